"""A node's supervisor is killed and its standby takes over: once, within the job's walls, for its
task alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any

import pytest

from shoal.client.handles import JobHandle
from shoal.runtime.files import spool
from shoal.runtime.process import tree
from shoal.runtime.standby import slot
from tests.support.planes.real import RankGate, RealPlane, running_plane, until
from tests.support.runtime.confinement_modes import CGROUP, needs
from tests.support.runtime.tasks import pids_with

RETRY = {"max": 3, "on": ["exit", "signal"]}
READY_S = 90.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), needs(CGROUP, "bubblewrap")]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPlane]:
    with running_plane(tmp_path_factory.mktemp("standby") / "home", demo="2x2") as real:
        yield real


def program(gate: RankGate) -> str:
    """Python that waits at the gate; asked to end, once more. It says first whether a zygote forked it."""
    port = gate._listener.getsockname()[1]
    code = (
        "import signal, socket, sys; print('forked:', 'shoal_warm.zygote' in sys.modules, flush=True); "
        f"wait = lambda *_: socket.create_connection(('127.0.0.1', {port})).recv(1); "
        "signal.signal(signal.SIGTERM, wait); wait()"
    )
    return f'python -c "{code}"'


class JobWithLostNode:
    """A job on two nodes, one of which will be lost."""

    def __init__(self, plane: RealPlane, gate: RankGate) -> None:
        self.plane, self.gate = plane, gate
        self.job: JobHandle = plane.submit(
            program(gate), resources={"nodes": 2, "gpus": 1, "memory": "2GB"}, retry=RETRY
        )
        gate.wait_for_ranks(2)
        (self.attempt,) = plane.attempts(plane.until_status(self.job, "running"))
        node = self.attempt["nodes"][1]
        self.share = spool.SpoolTask(plane.home / "spool" / "live" / self.attempt["attempt_id"] / node)
        self.place = Path(slot.directory_of(self.share) or "")

    def standby(self, other_than: int = 0) -> int:
        """Return the standby's process once it is ready."""

        def pids() -> int:
            (pid, *_) = (*pids_with(f"shoal.runtime.standby\0{self.place}\0"), 0)
            return pid if pid != other_than and Path(slot.socket_path(str(self.place))).exists() else 0

        return until(pids, f"a standby waits at {self.place}", READY_S)

    def kill_supervisor(self) -> int:
        claim = spool.read_claim(self.share)
        assert claim is not None
        os.kill(claim.pid, signal.SIGKILL)
        return claim.pid

    def successor(self, killed: int) -> int:
        """Return the supervisor that has the task now."""

        def pids() -> int:
            claim = spool.read_claim(self.share)
            return claim.pid if claim is not None and claim.pid != killed else 0

        return until(pids, "the share is claimed again")

    def forked(self, count: int) -> list[str]:
        """Return the first output of each rank of the node, in order, once there are `count`."""

        def said() -> list[str]:
            lines = re.findall(r"forked: (True|False)", Path(self.share.log).read_text(errors="replace"))
            return lines if len(lines) >= count else []

        return until(said, f"{count} ranks have begun")

    def finish(self) -> dict[str, Any]:
        """Let the job end well in one attempt. Nothing of a standby is left."""
        self.gate.open()
        self.plane.until_status(self.job, "succeeded")
        (after,) = self.plane.attempts(self.job)
        assert after["attempt_id"] == self.attempt["attempt_id"]
        assert (self.job.data["losses"], self.job.data["failures"]) == (0, 0)
        name = self.attempt["attempt_id"]
        until(lambda: not pids_with(f"standby/{name}"), "no standby runs")
        until(lambda: not list(self.plane.home.glob(f"spool/standby/{name}*")), "no standby has a place")
        until(lambda: not _cgroups(f"shoal.{name}*"), "no cgroup is left")
        return after


def test_standby_becomes_the_supervisor_and_a_new_standby_starts(plane: RealPlane, gate: RankGate) -> None:
    lost = JobWithLostNode(plane, gate)
    waiting = lost.standby()
    killed = lost.kill_supervisor()
    gate.wait_for_ranks(2)
    assert lost.successor(killed) == waiting
    assert pids_with(f"shoal.runtime.supervisor\0{lost.share.directory}") == [waiting]
    assert not lost.place.exists()
    assert lost.forked(2) == ["False", "True"], "it had made the imports of the earlier ranks"
    following = lost.standby(other_than=waiting)
    lost.kill_supervisor()
    gate.wait_for_ranks(2)
    assert lost.successor(waiting) == following
    assert lost.forked(3) == ["False", "True", "True"]
    lost.finish()


def test_standby_has_no_more_rights_than_the_job_and_takes_its_memory_from_the_jobs(
    plane: RealPlane, gate: RankGate
) -> None:
    lost = JobWithLostNode(plane, gate)
    waiting = lost.standby()
    cgroups, own_cgroups = spool.read_cgroups(lost.share), spool.read_cgroups(spool.SpoolTask(lost.place))
    assert not set(cgroups) & set(own_cgroups)
    rights = _rights(cgroups)
    assert rights
    # Its socket opens while the zygote starts, by a process that has not given up its rights so far.
    until(lambda: _rights(own_cgroups) == rights, "its zygote has the rights of the ranks")
    assert waiting not in tree.pids_in_cgroups(own_cgroups)
    until(
        lambda: _holders(spool.SpoolTask(lost.place).lock) == {waiting},
        "nothing else holds its place when it is dead",
    )
    limits = [_memory_limit(paths) for paths in (cgroups, own_cgroups)]
    assert sum(limits) <= 2_000_000_000
    lost.finish()


@pytest.mark.parametrize("harm", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.soak)])
def test_task_starts_without_its_standby_if_that_is_dead_or_hangs(
    plane: RealPlane, gate: RankGate, harm: signal.Signals
) -> None:
    lost = JobWithLostNode(plane, gate)
    waiting = lost.standby()
    os.kill(waiting, harm)
    killed = lost.kill_supervisor()
    gate.wait_for_ranks(2)
    successor = lost.successor(killed)
    assert successor != waiting
    if harm is signal.SIGSTOP:
        os.kill(waiting, signal.SIGCONT)
    until(lambda: not Path(f"/proc/{waiting}").exists(), "it ends when it wakes up", READY_S)
    assert lost.successor(killed) == successor, "the task was claimed once"
    lost.finish()


def test_standby_outlives_the_control_plane_and_serves_the_next_one(plane: RealPlane, gate: RankGate) -> None:
    lost = JobWithLostNode(plane, gate)
    waiting = lost.standby()
    plane.kill()
    killed = lost.kill_supervisor()
    plane.up()
    gate.wait_for_ranks(2)
    assert lost.successor(killed) == waiting
    lost.finish()


def test_standby_ends_with_a_job_that_is_cancelled(plane: RealPlane, gate: RankGate) -> None:
    lost = JobWithLostNode(plane, gate)
    waiting = lost.standby()
    cgroups = spool.read_cgroups(lost.share)
    lost.job.stop()
    gate.wait_for_ranks(2)  # the ranks save, and may use all the memory that the job asked for
    until(lambda: _memory_limit(cgroups) > 1_999_900_000, "the ranks have their memory back")
    until(
        lambda: not tree.pids_in_cgroups(spool.read_cgroups(spool.SpoolTask(lost.place))),
        "its zygote is gone",
    )
    assert tree.pids_in_cgroups(cgroups), "while they save"
    gate.open()
    plane.until_status(lost.job, "cancelled")
    until(lambda: not Path(f"/proc/{waiting}").exists(), "it is gone with the job")
    until(lambda: not lost.place.exists(), "so is its place")


def _holders(path: str) -> set[int]:
    """Return the processes that have the file open."""
    pids = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if str(link.readlink()) == path:
                pids.add(int(link.parts[2]))
    return pids


def _rights(cgroups: tuple[str, ...]) -> set[str]:
    """Return the rights of the processes in there. One that ends meanwhile has none."""
    pids: set[str] = set()
    for pid in tree.pids_in_cgroups(cgroups):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            pids.update(
                line for line in lines if line.startswith(("Uid:", "NoNewPrivs:", "CapEff:", "CapBnd:"))
            )
    return pids


def _memory_limit(cgroups: tuple[str, ...]) -> int:
    for path in cgroups:
        for name in ("memory.max", "memory.limit_in_bytes"):
            if (file := Path(path, name)).exists():
                return int(file.read_text())
    raise AssertionError(f"no memory limit in {cgroups}")


def _cgroups(pattern: str) -> list[str]:
    return glob(f"/sys/fs/cgroup/**/{pattern}", recursive=True)  # noqa: PTH207 - pathlib fails where others' go meanwhile
