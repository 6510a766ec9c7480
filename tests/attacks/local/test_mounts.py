"""Row 38: mounts that should show a job more of the machine than the operator opened to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.errors import SpecError
from shoal.runtime.confine.mounts import Mounts, open_as
from shoal.wire import EndKind, Mount, TaskOutcome
from tests.support.runtime.confinement_modes import CGROUP, JOB_UID, needs
from tests.support.runtime.tasks import ATTEMPT_ID, RunningTask, StartTask, a_task_spec

FULL = (CGROUP, "bubblewrap", "uid")
pytestmark = needs(*FULL)


def mounted(
    start: StartTask, source: Path | str, target: str = "/data", **fields: object
) -> tuple[TaskOutcome, RunningTask]:
    mounts = (Mount(source=str(source), target=target),)
    run = f"cat {target}/f || ls {target}"
    task = start(a_task_spec(run=run, mounts=mounts, confinement=FULL, uid=JOB_UID, **fields))
    return task.run(), task


def two_places(open_place: Path) -> tuple[Path, Path]:
    root, elsewhere = open_place / "root", open_place / "elsewhere"
    for place in (root, elsewhere):
        place.mkdir(mode=0o755)
        (place / "f").write_text(f"in {place.name}\n")
    return root, elsewhere


def test_a_link_inside_an_opened_root_does_not_lead_out_of_it(start: StartTask, open_place: Path) -> None:
    root, elsewhere = two_places(open_place)
    (root / "link").symlink_to(elsewhere)
    outcome, task = mounted(start, root / "link", mount_roots=(str(root),))
    assert outcome.kind is EndKind.SETUP_FAILED, task.describe()
    assert f"leads to `{elsewhere}`" in outcome.message


@pytest.mark.parametrize("is_open", [False, True])
def test_file_for_a_projects_group_is_closed_to_other_projects(
    start: StartTask, open_place: Path, *, is_open: bool
) -> None:
    (open_place / "shared").mkdir()
    (open_place / "shared").chmod(0o1777)
    mounts = (Mount(source=str(open_place / "shared"), target="/data"),)

    def run(uid: int, line: str) -> tuple[EndKind, str]:
        task_spec = a_task_spec(
            attempt_id=f"att_{uid}",
            run=line,
            uid=uid,
            confinement=FULL,
            mounts=mounts,
            mount_roots=(str(open_place),),
            has_open_network=is_open,
        )
        task = start(task_spec)
        return task.run().kind, task.describe()

    kind, output = run(JOB_UID, "umask 007; echo only-mine > /data/f; cat /data/f")
    assert kind is EndKind.SUCCEEDED, output
    kind, output = run(JOB_UID + 1, "cat /data/f; echo changed > /data/f")
    assert kind is not EndKind.SUCCEEDED, output
    assert (open_place / "shared" / "f").read_text() == "only-mine\n"


def test_dots_in_a_source_do_not_lead_out_of_an_opened_root(start: StartTask, open_place: Path) -> None:
    root, _ = two_places(open_place)
    outcome, _ = mounted(start, f"{root}/../elsewhere", mount_roots=(str(root),))
    assert outcome.kind is EndKind.SETUP_FAILED
    assert "outside of" in outcome.message


def test_a_link_inside_a_root_that_is_itself_a_link_still_works(start: StartTask, open_place: Path) -> None:
    root, _ = two_places(open_place)
    (root / "v1").mkdir()
    (root / "v1" / "f").write_text("first\n")
    (root / "latest").symlink_to("v1")
    (open_place / "name").symlink_to(root)
    outcome, task = mounted(start, open_place / "name" / "latest", mount_roots=(str(open_place / "name"),))
    assert outcome.kind is EndKind.SUCCEEDED, outcome
    assert task.texts() == ["first"]


def test_no_roots_means_no_mounts(start: StartTask, open_place: Path) -> None:
    outcome, _ = mounted(start, open_place, mount_roots=())
    assert outcome.kind is EndKind.SETUP_FAILED


def test_a_directory_that_only_shoals_own_groups_can_reach_is_not_opened(open_place: Path) -> None:
    closed = open_place / "closed"
    (closed / "inner").mkdir(parents=True)
    os.chown(closed, 0, 0)
    closed.chmod(0o750)
    before = os.getgroups()
    os.setgroups([0])
    try:
        with pytest.raises(SpecError, match="Permission denied"):
            open_as(str(closed / "inner"), JOB_UID)
        assert (os.geteuid(), os.getegid(), os.getgroups()) == (0, 0, [0])
    finally:
        os.setgroups(before)


@pytest.mark.parametrize(
    "target",
    [sys.prefix, f"{sys.base_prefix}/lib", "/usr/bin", "/etc/ssl", "/dev/shm", "/run/user", "/proc/1"],
)
def test_mount_cannot_cover_programs_that_shoal_runs(start: StartTask, open_place: Path, target: str) -> None:
    outcome, _ = mounted(start, open_place, target)
    assert outcome.kind is EndKind.SETUP_FAILED
    assert "would cover" in outcome.message


@pytest.mark.parametrize("link", ["../../../oldroot/root", "/etc", "nowhere"])
def test_a_target_behind_a_link_that_a_job_planted_is_refused(
    start: StartTask, open_place: Path, link: str
) -> None:
    (open_place / "plant").symlink_to(link)
    outcome, task = mounted(start, open_place, f"{open_place}/plant/shoal-made-this")
    assert outcome.kind is EndKind.SETUP_FAILED, task.describe()
    assert not any(Path(p, "shoal-made-this").exists() for p in ("/root", "/etc", str(open_place)))


def test_a_target_whose_neighbours_others_can_exchange_is_refused(start: StartTask, open_place: Path) -> None:
    (open_place / "neighbour").mkdir()
    outcome, _ = mounted(start, open_place, f"{open_place}/new")
    assert outcome.kind is EndKind.SETUP_FAILED
    assert "others than its administrator can change" in outcome.message


def test_source_exchanged_between_check_and_mount_is_noticed(open_place: Path) -> None:
    source, other = two_places(open_place)
    task_spec = a_task_spec(mounts=(Mount(source=str(source), target=str(open_place / "target")),))
    mounts = Mounts(task_spec.folders, JOB_UID, "/nowhere", ())
    mounts.open()
    (open_place / "target").symlink_to(source)
    mounts.check()
    (open_place / "target").unlink()
    (open_place / "target").symlink_to(other)
    with pytest.raises(SpecError, match="exchanged"):
        mounts.check()
    mounts.close()


SWAPPER = """
import os, sys, time
os.chdir(sys.argv[1])
os.symlink("closed/secret", "evil")
print("ready", flush=True)
while True:
    os.rename("x", "aside"); os.rename("evil", "x"); time.sleep(0.003)
    os.rename("x", "evil"); os.rename("aside", "x"); time.sleep(0.003)
"""


@pytest.mark.serial
def test_a_source_exchanged_for_a_link_again_and_again_never_shows_the_other(
    start: StartTask, open_place: Path
) -> None:
    (open_place / "x").mkdir()
    (open_place / "x" / "f").write_text("mine\n")
    secret = open_place / "closed" / "secret"
    secret.mkdir(parents=True)
    (secret / "f").write_text("secret\n")
    (open_place / "closed").chmod(0o700)
    command = [sys.executable, "-c", SWAPPER, str(open_place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as swapper:
        try:
            assert swapper.stdout is not None
            swapper.stdout.readline()
            texts = []
            for number in range(16):
                outcome, task = mounted(start, open_place / "x", attempt_id=f"{ATTEMPT_ID}-{number}")
                texts += task.texts()
                assert outcome.kind in (EndKind.SUCCEEDED, EndKind.SETUP_FAILED), outcome
        finally:
            swapper.kill()
    assert set(texts) <= {"mine"}


def test_mount_of_a_visible_path_is_accepted_and_shows_no_more(tmp_path: Path) -> None:
    """A program's own folder in a clone below /tmp, whose environment the job is shown."""
    shown = tmp_path.resolve() / "clone"
    (shown / "src").mkdir(parents=True)
    (shown / "link").symlink_to(tmp_path)

    def opened(source: str, target: str, *, is_read_only: bool = True) -> str:
        mount = Mount(source=source, target=target, is_read_only=is_read_only)
        mounts = Mounts(a_task_spec(mounts=(mount,)).folders, None, "/nowhere", (str(shown),))
        try:
            mounts.open()
        except SpecError as error:
            return error.message
        finally:
            mounts.close()
        return ""

    inside = str(shown / "src")
    assert opened(inside, inside) == ""
    assert opened(str(shown), str(shown)) == ""
    for source, target, is_read_only in (
        (inside, inside, False),  # what Shoal runs, for a job to change
        (str(tmp_path), inside, True),
        (str(shown / "link"), str(shown / "link"), True),
        (str(tmp_path.resolve()), str(tmp_path.resolve()), True),
    ):
        assert "would cover" in opened(source, target, is_read_only=is_read_only)
