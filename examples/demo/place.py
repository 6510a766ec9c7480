"""Where the demo's cluster lives: a new directory for each run, removed with everything that ran in it.

A run that was killed leaves its directory; the next one finds it, stops what still runs there and removes
it. A directory whose demo still runs, or that belongs to somebody else, is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from examples.demo.processes import processes_of
from examples.demo.stage import Stage, say

PREFIX = f"shoal-demo-{os.getuid()}-"
LOCK = "demo.lock"


@contextlib.contextmanager
def a_stage() -> Iterator[Stage]:
    """A stage with an empty home. Whatever happens on it, nothing of it is left afterwards."""
    folder = Path(tempfile.gettempdir())
    for left in sorted(folder.glob(f"{PREFIX}*")):
        clear_away(left)
    root = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
    root.chmod(0o711)  # root's jobs run as other users, and without bubblewrap these must pass through
    lock = hold(root)
    assert lock is not None
    # Locked before it gets its name: another demo that starts now must not clear it away.
    root = root.rename(folder / root.name.removeprefix("."))
    with lock:
        stage = Stage(root / "home")
        try:
            yield stage
        finally:
            strike(stage)
            shutil.rmtree(root)


def hold(root: Path) -> IO[str] | None:
    """The directory's lock, held until closed; None while its own demo runs."""
    file = (root / LOCK).open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def clear_away(root: Path) -> None:
    """Remove what an interrupted demo left, its processes first."""
    facts = root.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        return
    lock = hold(root)
    if lock is None:
        return
    with lock:
        say(f"an earlier demo was interrupted: stopping what runs in {root} and removing it")
        strike(Stage(root / "home"))
        shutil.rmtree(root)


def strike(stage: Stage) -> None:
    """Stop every job and the control plane. Without a control plane one is started to do it properly."""
    if processes_of(stage.home):
        stage.quietly("up")
        stage.quietly("down", "--jobs")
