"""A test that is killed leaves networks, and daemons in them: the next laboratory sweeps these alone."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.host import lab_locks
from tests.support.host.cluster_lab import NodeNetworks
from tests.support.host.processes import PATH, ip, is_alive, until_dead

ROOT = Path(__file__).parents[3]
LAB = """
import os, subprocess, sys, time
from tests.support.host.cluster_lab import NodeNetworks
lab = NodeNetworks(("n0", "n1"))
lab.make_network()
inside = subprocess.Popen([*lab.netns_command("n1"), "sleep", "1000"], start_new_session=True)
beside = subprocess.Popen(["sleep", "1000"], env={**os.environ, **lab.mark}, start_new_session=True)
other = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(lab.number, inside.pid, beside.pid, other.pid, flush=True)
time.sleep(1000)
"""

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("ip", path=PATH) is None,
    reason="networks need root, and `scripts/setup engines` for ip",
)


class Lab(NamedTuple):
    process: subprocess.Popen[str]
    number: int
    own: list[int]
    """A process in one of its networks, and one with its mark."""
    other: int

    @property
    def lock(self) -> Path:
        return lab_locks._file("0", self.number)

    def has_network(self) -> bool:
        tag = f"sh{self.number}"
        told = ip("netns", "list") + ip("-o", "link")
        return re.search(rf"^({tag}-|\d+: {tag}[bv])", told, re.MULTILINE) is not None


@contextmanager
def a_lab() -> Iterator[Lab]:
    process = subprocess.Popen([sys.executable, "-c", LAB], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    number, inside, beside, other = map(int, process.stdout.readline().split())
    lab = Lab(process, number, [inside, beside], other)
    try:
        yield lab
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        lab_locks.sweep_dead_labs()
        os.kill(other, signal.SIGKILL)


def start_another() -> None:
    NodeNetworks(("n0",)).remove_network()


def test_what_a_killed_laboratory_has_left_is_swept_when_the_next_one_starts() -> None:
    with a_lab() as lab:
        lab.process.kill()
        lab.process.wait()
        assert lab.has_network()
        assert all(map(is_alive, lab.own))
        start_another()
        assert until_dead(lab.own)
        assert not lab.has_network()
        assert is_alive(lab.other), "who started it does not matter"
        assert lab.lock.read_text() == ""


def test_a_living_laboratory_is_left_alone_also_without_its_lock() -> None:
    with a_lab() as lab:
        start_another()
        said = lab.lock.read_text()
        lab.lock.unlink()
        start_another()
        lab.lock.write_text(said)
        start_another()
        assert lab.has_network()
        assert all(map(is_alive, lab.own))


def test_a_process_that_has_the_number_of_a_dead_one_is_another() -> None:
    with a_lab() as lab:
        lab.process.kill()
        lab.process.wait()
        tag, pid, started = lab.lock.read_text().split()
        assert (tag, int(pid)) == (f"sh{lab.number}", lab.process.pid)
        lab.lock.write_text(f"{tag} {os.getpid()} {int(started) + 1}")
        start_another()
        assert not lab.has_network()
        os.kill(lab.own[1], signal.SIGKILL)  # the mark has the name of who is dead


def test_what_a_file_says_of_another_number_is_not_believed() -> None:
    other = lab_locks._file("0", lab_locks.NUMBERS + os.getpid())  # nobody takes this one
    with a_lab() as lab:
        tag, pid, started = lab.lock.read_text().split()
        other.write_text(f"{tag} {pid} {int(started) + 1}")  # who is dead, it seems
        try:
            lab_locks.sweep_dead_labs()
        finally:
            other.unlink()
        assert lab.has_network()
        assert all(map(is_alive, lab.own))


@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_that_somebody_else_has_laid_is_none_of_ours(*, is_link: bool, tmp_path: Path) -> None:
    file = tmp_path / "laid"
    if is_link:
        file.symlink_to(tmp_path / "secret")
    else:
        file.touch()
        os.chown(file, 65534, 65534)
    assert lab_locks._lock(file, os.O_CREAT) is None
    assert not (tmp_path / "secret").exists()


def test_what_somebody_has_ended_is_nobodys() -> None:
    lab = NodeNetworks(("n0",))
    lab.make_network()
    lab.remove_network()
    lab.remove_network()
    assert lab_locks._file("0", lab.number).read_text() == ""
