"""What happened in a simulated cluster, job by job and over time, before anybody adds it up."""

from __future__ import annotations

from array import array
from math import nan

from shoal.sim.workload import Workload


class Timeline:
    """The cluster after each decision: four columns, one row each."""

    def __init__(self) -> None:
        self.at = array("d")
        self.queued = array("d")
        self.used = array("d")
        self.open = array("d")

    def note(self, at: float, queued: int, used: float, is_open: float) -> None:
        self.at.append(at)
        self.queued.append(queued)
        self.used.append(used)
        self.open.append(is_open)


class Stays:
    """Every time that a job held devices, one row each: whose, how many, from when to when."""

    def __init__(self) -> None:
        self.job = array("q")
        self.devices = array("d")
        self.begin = array("d")
        self.end = array("d")

    def note(self, job: int, devices: float, begin: float, end: float) -> None:
        self.job.append(job)
        self.devices.append(devices)
        self.begin.append(begin)
        self.end.append(end)


class Outcome:
    """Jobs by their index in the workload."""

    def __init__(self, workload: Workload) -> None:
        count = len(workload.jobs)
        self.workload = workload
        self.starts = array("d", [nan]) * count
        """When each first started; NaN for one that was refused."""
        self.ends = array("d", [nan]) * count
        self.refused: list[int] = []
        """Jobs that this cluster could never hold."""
        self.useful = 0.0
        """Device-seconds of work that was not lost."""
        self.lost = 0.0
        """Device-seconds of work since the last checkpoint, gone when a job was stopped."""
        self.overhead = 0.0
        """Device-seconds in which checkpoints were written and read."""
        self.num_interrupted = 0
        """How often a job was stopped and queued again."""
        self.num_failures = 0
        """How often a node failed."""
        self.stays = Stays()
        self.timeline = Timeline()
