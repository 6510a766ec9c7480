"""The home's disk fills up or freezes under a running cluster, and is well again later."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.faults.people import TAKEN, Person, is_root, running, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not is_root(), reason="mounting disks takes root"),
]

FULL_SIZE = 48 << 20
ENOUGH = 12
"""Refusals in a row: by then no slack of the file system or of the database's log is left."""


class Disk(NamedTuple):
    """A file system of its own at `path`."""

    path: Path
    spoil: Callable[[], None]
    mend: Callable[[], None]


def call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"`{' '.join(command)}` does not work here: {done.stderr.strip()}")


@contextlib.contextmanager
def full_disk(home: Path) -> Iterator[Disk]:
    """tmpfs: no block is left, not even for the database's log."""
    call("mount", "-t", "tmpfs", "-o", f"size={FULL_SIZE},mode=700", "shoal-test", str(home))
    filler = home / "filler"

    def fill() -> None:
        with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)

    try:
        yield Disk(home, fill, filler.unlink)
    finally:
        subprocess.run(["umount", "-l", str(home)], check=True)


@contextlib.contextmanager
def frozen_disk(home: Path) -> Iterator[Disk]:
    """ext4 with every file immutable: what a disk gone read-only is to files that are open.

    A plain `remount,ro` is refused by the kernel while files are open for writing.
    """
    with ext4(home):

        def freeze(sign: str) -> None:
            # The rank's own directory may vanish while chattr walks.
            subprocess.run(["chattr", "-R", "-f", f"{sign}i", str(home)], check=False)

        try:
            yield Disk(home, lambda: freeze("+"), lambda: freeze("-"))
        finally:
            freeze("-")


@contextlib.contextmanager
def ext4(home: Path) -> Iterator[Path]:
    image = home.parent / "disk.img"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    call("mkfs.ext4", "-q", "-F", str(image))
    call("mount", "-o", "loop,errors=remount-ro", str(image), str(home))
    shutil.rmtree(home / "lost+found", ignore_errors=True)
    try:
        yield image
    finally:
        subprocess.run(["umount", "-l", str(home)], check=True)


@pytest.mark.parametrize("make_disk", [full_disk, frozen_disk])
def test_disk_that_takes_nothing_is_never_acknowledged_and_costs_nothing(
    root: Path, make_disk: Callable[[Path], contextlib.AbstractContextManager[Disk]]
) -> None:
    with make_disk(home_in(root)) as disk, running(root) as person:
        cluster = person.cluster
        ends_meanwhile = person.start("ends-meanwhile")
        runs_on = person.start("runs-on")
        disk.spoil()
        refuse_enough(person)
        person.let_go("ends-meanwhile")
        until(lambda: len(cluster.find_processes().ranks) <= 2, "one job has ended")
        refuse_enough(person)
        assert person.ask("GET", "/healthz")[1]["status"] == "degraded"
        assert cluster.find_processes().ranks, "the disk's trouble ended a job that runs"
        assert cluster.starts == 1, f"the control plane died:\n{cluster.last_output()}"
        disk.mend()
        assert person.wait_for(ends_meanwhile, "succeeded")["epoch"] == 1
        person.wait_for(runs_on, "running")
        person.let_go("runs-on")
        assert person.wait_for(runs_on, "succeeded")["epoch"] == 1
        everything_was_as_told(person)
        assert cluster.starts == 1, f"the control plane died:\n{cluster.last_output()}"


def test_disk_gone_read_only_for_good_loses_nothing_over_a_repair(root: Path) -> None:
    """The kernel found an error and lets nobody write: repaired offline, then started again."""
    home = home_in(root)
    with ext4(home) as image:
        device = subprocess.run(
            ["findmnt", "-no", "SOURCE", str(home)], capture_output=True, text=True, check=True
        ).stdout.strip()
        trigger = Path("/sys/fs/ext4") / Path(device).name / "trigger_fs_error"
        if not trigger.exists():
            pytest.skip("this kernel cannot be told to find an error on a disk")
        with running(root) as person:
            job_id = person.start("runs-on")
            trigger.write_text("1")
            refuse_enough(person)
            assert person.cluster.find_processes().ranks, "the disk's trouble ended a job that runs"
            person.let_go("runs-on")
            until(lambda: not person.cluster.find_processes().ranks, "the job has ended")
            person.cluster.close()
            for pid in person.cluster.find_processes().all_of_jobs():
                person.cluster.kill(pid)
            until(lambda: not person.cluster.leftovers(), "nobody uses the disk any more")
            call("umount", str(home))
            subprocess.run(["e2fsck", "-fy", str(image)], capture_output=True, check=False)
            call("mount", "-o", "loop", str(image), str(home))
            person.cluster.reopen()
            person.cluster.wait_ready()
            person.endpoint = person.locate()
            assert person.wait_for(job_id, "succeeded")["epoch"] <= 2
            everything_was_as_told(person)


def home_in(root: Path) -> Path:
    home = root / "home"
    home.mkdir(mode=0o700)
    return home


def refuse_enough(person: Person) -> None:
    """Submit until that many in a row were refused; each with 503, since asking again is right."""
    in_a_row = 0
    for number in itertools.count():
        assert number < 3000, "the disk is not in trouble: submissions are still taken"
        status = person.submit(person.short(f"short-{number}"))
        assert status in (*TAKEN, 503), f"answered with {status}"
        in_a_row = 0 if status in TAKEN else in_a_row + 1
        if in_a_row >= ENOUGH:
            return


def everything_was_as_told(person: Person) -> None:
    """What was acknowledged is there; what was refused is not, until it is asked again."""
    known = {str(job["job_id"]): job for job in person.jobs()}
    assert set(known) == set(person.acknowledged.values())
    for key, spec in list(person.refused.items()):
        assert person.submit(spec, key) in TAKEN
    for job_id in person.acknowledged.values():
        assert person.wait_for(job_id, "succeeded")["epoch"] <= 2
    assert len(person.jobs()) == len(person.acknowledged)
    assert person.is_log_intact()
