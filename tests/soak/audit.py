"""After the kills: what was lost, doubled or left behind. Every count named in `MUST_BE_ZERO` must be 0."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.client import Shoal
from tests.soak.cluster import SoakCluster
from tests.soak.load import NODES, MixedLoad

SETTLE_S = 300.0
ENDED = ("succeeded", "failed", "cancelled")
MUST_BE_ZERO = (
    "jobs lost",
    "jobs not ended",
    "succeeded without a trace",
    "ids reused",
    "attempts begun twice",
    "overlaps",
    "orphan processes",
    "orphan cgroups",
    "orphan mounts",
    "files left in the spool",
    "event log broken",
    "doctor complains",
)


def broken_promises(counts: dict[str, int]) -> list[str]:
    """The promises that did not hold."""
    return [name for name in MUST_BE_ZERO if counts[name]]


def audit(cluster: SoakCluster, load: MixedLoad) -> dict[str, int]:
    """No more kills: everything accepted must end, and nothing may be left."""
    with cluster.client() as shoal:
        for node in NODES:
            shoal.resume(node)
        jobs = _wait_for_the_end(cluster, shoal)
        chain = shoal.verify_audit()
    by_id = {str(job["job_id"]): job for job in jobs}
    numbers = Counter(job["number"] for job in jobs)
    witness = SoakWitness(cluster.witness)
    left = {
        "orphan processes": cluster.leftovers(),
        "orphan cgroups": list(_cgroups(cluster.home)),
        "orphan mounts": list(_mounts(cluster.root)),
        "files left in the spool": list(_unfinished_in_spool(cluster.home)),
        "doctor complains": [str(finding) for finding in cluster.doctor()],
        "overlaps": witness.overlaps,
        "attempts begun twice": witness.begun_twice,
        "succeeded without a trace": [
            str(job["ref"]) for job in jobs if not witness.confirms(job, load.accepted)
        ],
        "jobs not ended": [f"{job['ref']} {job['status']}" for job in jobs if job["status"] not in ENDED],
        "jobs lost": sorted(set(load.accepted) - set(by_id)),
    }
    for name, things in left.items():
        for thing in things[:10]:
            print(f"  {name}: {thing}", flush=True)
    statuses = Counter(str(job["status"]) for job in jobs)
    return {
        "control plane starts": cluster.starts,
        "jobs accepted": len(load.accepted),
        **{f"commands answered: {verb}": count for verb, count in sorted(load.num_answered.items())},
        **{f"commands refused: {code}": count for code, count in sorted(load.num_refused.items())},
        **{f"jobs {status}": count for status, count in sorted(statuses.items())},
        "starts witnessed": witness.num_begun,
        "ids reused": sum(count - 1 for count in numbers.values()) + len(jobs) - len(by_id),
        "event log broken": 0 if chain["is_intact"] else 1,
        **{name: len(things) for name, things in left.items()},
    }


class SoakWitness:
    """What the ranks themselves wrote: one file for each rank of each job."""

    def __init__(self, directory: Path) -> None:
        self._lines = {path.name: path.read_text().splitlines() for path in directory.iterdir()}
        self.overlaps = [f"{name}: {line}" for name, line in self._all() if line.startswith("overlap ")]
        begun = Counter(f"{name}: {line}" for name, line in self._all() if line.startswith("start "))
        self.begun_twice = [line for line, count in begun.items() if count > 1]
        self.num_begun = begun.total()

    def _all(self) -> Iterator[tuple[str, str]]:
        return ((name, line) for name, lines in self._lines.items() for line in lines)

    def confirms(self, job: dict[str, Any], num_ranks: dict[str, int]) -> bool:
        """Whether every rank of a job that is said to have succeeded got to its end, in one attempt."""
        job_id = str(job["job_id"])
        if job["status"] != "succeeded" or job_id not in num_ranks:
            return True
        ends = [
            {line for line in self._lines.get(f"{job_id}.rank-{rank}", ()) if line.startswith("end ")}
            for rank in range(num_ranks[job_id])
        ]
        return bool(set.intersection(*ends))


def _wait_for_the_end(cluster: SoakCluster, shoal: Shoal) -> list[dict[str, Any]]:
    deadline = time.monotonic() + SETTLE_S
    while True:
        jobs = list(shoal.jobs())
        is_over = all(job["status"] in ENDED for job in jobs)
        is_clean = is_over and not cluster.leftovers() and not list(_unfinished_in_spool(cluster.home))
        if is_clean or time.monotonic() > deadline:
            return jobs
        time.sleep(1)


def _attempts(home: Path) -> set[str]:
    return {path.name for place in ("live", "archived") for path in (home / "spool" / place).glob("*")}


def _cgroups(home: Path) -> Iterator[str]:
    """Directories that were made for this home's attempts, in any hierarchy."""
    attempts = _attempts(home)
    # `walk` goes on when a directory that belongs to somebody else goes away under it.
    for folder, names, _ in os.walk("/sys/fs/cgroup"):
        for name in names:
            if name.startswith("shoal.") and name.split(".")[1] in attempts:
                yield f"{folder}/{name}"


def _mounts(root: Path) -> Iterator[str]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if str(root) in line:
            yield line


def _unfinished_in_spool(home: Path) -> Iterator[str]:
    """What only living, half made or half removed attempts have."""
    for place in ("live", "draft/*", "trash"):
        for path in (home / "spool").glob(f"{place}/*"):
            yield str(path)
