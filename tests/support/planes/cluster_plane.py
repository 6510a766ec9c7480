"""A real control plane on a laboratory's cluster: connected, started and killed as people do.

Its jobs bear witness: what their ranks wrote down shows who ran, and that nobody ran beside themselves.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from shoal.client.handles import ENDED, JobHandle
from shoal.runtime.files import spool
from tests.support.faults.witness import Witness
from tests.support.host.cluster_lab import ClusterLab
from tests.support.planes.real import RealPlane, until
from tests.support.runtime.tasks import SOURCE

ONE_NODE, TWO_NODES = {"cpus": 1}, {"nodes": 2, "cpus": 1}
MIN_BEATS = 5
"""Beats of a rank, half a second: it goes on."""
LONG_S = 150.0
CONNECT_S = 240.0


class ClusterPlane(RealPlane):
    def __init__(self, home: Path, lab: ClusterLab, *flags: str) -> None:
        super().__init__(home)
        self.witness = Witness(home.parent / "witness")
        """Of the jobs that `witness.job` describes."""
        self._flags = ("--listen", "127.0.0.1:0", "--mount-roots", str(home.parent), *flags)
        self.env |= lab.variables
        self.lab = lab
        self.engine_name = lab.engine
        self.shared = home.parent / "shared"
        self.spool = home.parent / "spool"
        self.submissions: list[JobHandle] = []
        """Everything that was ever submitted here."""

    def connect(self, *options: str, python: str = "") -> dict[str, object]:
        self.shared.mkdir(exist_ok=True)
        places = ("--shared", str(self.shared), "--spool", str(self.spool))
        pythons = ("--python", python or self.lab.nodes_python, "--python-path", SOURCE)
        fixed = ("--as-root", *pythons, *places, *options, "--json")
        words = (self.lab.engine, *self.lab.connect_options(), *fixed)
        done = self.command("connect", *words, timeout_s=CONNECT_S)
        assert done.returncode == 0, done.stderr
        told: dict[str, object] = json.loads(done.stdout)
        return told

    def attempt(self, job: JobHandle) -> dict[str, Any]:
        """The present one."""
        return self.attempts(job)[-1]

    def supervisor_pid(self, attempt: dict[str, Any], node: str) -> int:
        """The process that supervises the attempt's first share there; its parent is the keeper."""
        place = self.spool / "spool" / "live" / attempt["attempt_id"] / node
        claim = spool.read_claim(spool.SpoolTask(place))
        assert claim is not None
        assert claim.pid in self.lab.pids_on(node)
        return claim.pid

    def log_of(self, job: JobHandle) -> list[str]:
        return [line["text"] for line in self.shoal.logs(job.job_id)]

    def nodes_alive(self) -> set[str]:
        return {node["name"] for node in self.shoal.nodes() if node["is_alive"]}

    def until_alive(self, node: str) -> None:
        until(lambda: node in self.nodes_alive(), f"{node} is alive", within_s=LONG_S)

    @contextlib.contextmanager
    def only_node(self, node: str) -> Iterator[None]:
        """What is submitted meanwhile goes there."""
        others = [
            one["name"] for one in self.shoal.nodes() if one["state"] == "ready" and one["name"] != node
        ]
        self._each("cordon", others)
        try:
            yield
        finally:
            self._each("resume", others)

    def _each(self, verb: str, nodes: Collection[str]) -> None:
        for name in nodes:
            done = self.command("nodes", verb, name)
            assert done.returncode == 0, done.stderr

    def submit(self, run: str, **fields: Any) -> JobHandle:
        self.submissions.append(super().submit(run, **fields))
        return self.submissions[-1]

    def stop_all_except(self, others: Collection[JobHandle]) -> None:
        """A test that failed leaves nothing to the next."""
        left = [job for job in self.submissions if job not in others and job.refresh().status not in ENDED]
        for job in left:
            job.stop()
        for job in left:
            self.until_status(job, *ENDED)

    # Jobs that bear witness.

    def submit_witness(self, resources: dict[str, int], *options: str, fence: str = "30m") -> JobHandle:
        return self.submit(
            **self.witness.job_fields(float("inf"), *options),
            resources=resources,
            fence=fence,
            grace="2s",
            retry={"max": 3, "on": ["exit", "signal"]},
        )

    def start_witness(self, resources: dict[str, int], *options: str, fence: str = "30m") -> JobHandle:
        """A job whose ranks all run."""
        job = self.submit_witness(resources, *options, fence=fence)
        self.until_starts(job, resources.get("nodes", 1))
        return self.until_status(job, "running")

    def until_starts(self, job: JobHandle, count: int, within_s: float = LONG_S) -> None:
        told = f"{count} ranks of {job.ref} have begun"
        until(lambda: len(self.witness.lines(job.job_id, "start")) == count, told, within_s=within_s)

    def wait_for_progress(self, job: JobHandle, rank: int = 0, event: str = "beat") -> None:
        seen, told = self.witness.count(job.job_id, event, rank), f"rank {rank} of {job.ref} goes on"
        until(lambda: self.witness.count(job.job_id, event, rank) > seen + MIN_BEATS, told)

    def finish(self, job: JobHandle, attempts: int | None = 1) -> None:
        """It succeeds, in so many attempts (None: in any), and never ran beside itself."""
        self.witness.release(job)
        self.until_status(job, "succeeded", "failed", "cancelled")
        told = self.attempts(job)
        assert job.status == "succeeded", told
        assert attempts in (None, len(told)), told
        assert self.witness.overlaps(job.job_id) == []

    def is_explained(self, job: JobHandle, text: str) -> bool:
        return text in json.dumps(self.shoal.why(job.job_id))

    def until_explained(self, job: JobHandle, text: str) -> None:
        """Until the API knows it; `shoal why`, which is a program to start, then says it too."""
        until(lambda: self.is_explained(job, text), f"why says `{text}` of {job.ref}")
        until(lambda: text in self.command("why", job.ref).stdout, f"`shoal why` says `{text}`")

    def is_reported_silent(self, job: JobHandle) -> bool:
        return self.is_explained(job, "no sign of life")


def parent_of(pid: int) -> int:
    """0: it is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def is_running(pid: int) -> bool:
    """Neither gone nor a zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@contextlib.contextmanager
def cluster_plane(home: Path, lab: ClusterLab, *flags: str) -> Iterator[ClusterPlane]:
    """One that is up; afterwards nothing of it runs."""
    plane = ClusterPlane(home, lab, *flags)
    plane.connect()
    plane.up()
    try:
        yield plane
    finally:
        plane.down()
