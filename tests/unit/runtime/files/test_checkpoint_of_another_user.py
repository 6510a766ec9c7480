"""A replica that serves a checkpoint of a job that ran as another user."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.errors import SpecError
from shoal.runtime.files.checkpoint_storage import open_directory

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else: `sudo make test`")


def as_nobody(work: Callable[[], str]) -> str:
    """Return the message or path that a process of `nobody` gets."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setuid(pwd.getpwnam("nobody").pw_uid)
        os.write(writer, work().encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader) as pipe:
        return pipe.read()


@pytest.mark.parametrize(
    ("job", "save", "is_open"), [(0o700, 0o755, False), (0o755, 0o700, False), (0o755, 0o755, True)]
)
def test_checkpoint_of_another_user_is_served_only_if_others_may_read_it(
    tmp_path: Path, job: int, save: int, is_open: bool
) -> None:
    place = tmp_path / "job_1" / "step-1"
    place.mkdir(parents=True)
    place.chmod(save)
    place.parent.chmod(job)
    tmp_path.chmod(0o755)
    above = os.open(tmp_path, os.O_PATH)
    path = f"/proc/self/fd/{above}/job_1/step-1"  # the folders above a test's own are closed to other users

    def look() -> str:
        try:
            os.close(open_directory(path))
        except SpecError as error:
            return f"{error.message} | {error.hint}"
        return "open"

    message = as_nobody(look)
    os.close(above)
    assert (message == "open") is is_open
    assert is_open or "which is another user's: its owner lets others read it with `chmod -R o+rX`" in message
