"""What ranks of `witness_rank` wrote down, read: who began, who overlapped whom, who still runs."""

from __future__ import annotations

import shlex
import shutil
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from shoal.client.handles import JobHandle

TARGET = "/witness"
PROGRAM = Path(__file__).with_name("witness_rank.py")
STUCK_OPTIONS = ("--stuck", "--stuck-thread")
"""Options with which a rank does not die, once there is a `deaf_disk` in the witness's `deaf`."""


def since_boot() -> float:
    """As ranks write it down."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class WitnessLine(NamedTuple):
    """One thing that a rank said."""

    event: str
    attempt_id: str
    rendezvous_round: int
    node: str
    at: float
    """Seconds since boot, on the one kernel that all nodes have."""
    rank: int


class Witness:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.hung_dir = folder / "deaf"
        shutil.copy(PROGRAM, folder)  # jobs cannot read a clone in a closed home

    def job_fields(self, seconds: float = float("inf"), *options: str) -> dict[str, Any]:
        """For the spec of a job: what it runs in every rank, and where that is written down."""
        run = shlex.join(["exec", "python", f"{TARGET}/{PROGRAM.name}", TARGET, str(seconds), *options])
        return {"run": run, "mounts": [{"source": str(self._folder), "target": TARGET}]}

    def release(self, job: JobHandle) -> None:
        """Its ranks end by themselves, those that begin later too."""
        (self._folder / f"{job.job_id}.open").touch()

    def lines(self, job_id: str, *wanted: str) -> list[WitnessLine]:
        """What its ranks said, by time; of all kinds, or of these."""
        found = []
        for path in self._folder.glob(f"{job_id}.*.told"):
            rank = int(path.name.split(".")[-2])
            # The last line may be on its way.
            for text in path.read_text().rpartition("\n")[0].splitlines():
                what, attempt_id, generation, node, at = text.split()
                found.append(WitnessLine(what, attempt_id, int(generation), node, float(at), rank))
        lines = (line for line in found if not wanted or line.event in wanted)
        return sorted(lines, key=lambda line: line.at)

    def count(self, job_id: str, event: str, rank: int) -> int:
        return sum(line.rank == rank for line in self.lines(job_id, event))

    def overlaps(self, job_id: str) -> list[str]:
        """Each time that a rank ran beside itself or another attempt, or began twice as the same one."""
        refused = [f"overlap {line}" for line in self.lines(job_id, "overlap")]
        begun = Counter(
            (one.attempt_id, one.rendezvous_round, one.rank) for one in self.lines(job_id, "start")
        )
        twice = [f"begun {times} times {key}" for key, times in begun.items() if times > 1]
        attempts: dict[str, tuple[float, float]] = {}
        for line in self.lines(job_id):
            first, _ = attempts.get(line.attempt_id, (line.at, line.at))
            attempts[line.attempt_id] = (first, line.at)
        spans = sorted((*span, attempt_id) for attempt_id, span in attempts.items())
        beside = [
            f"{b} began before {a} ended" for (_, end, a), (begin, _, b) in pairwise(spans) if begin <= end
        ]
        return [*refused, *twice, *beside]
