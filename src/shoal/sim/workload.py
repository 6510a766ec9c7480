"""The input and the outcome of a simulation.

A workload has nodes, and jobs with the run times that only the simulator knows. `from_trace` makes a workload
from a trace; any other source of the same struct works too. A `SimulationOutcome` has what happened, job by
job and over time, before `report` adds it up.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import StrEnum
from math import nan

import msgspec

from shoal.model.attempt import Allocation
from shoal.model.job import ResourceRequest
from shoal.model.node import Window
from shoal.scheduler.facts.amounts import ProjectInfo
from shoal.scheduler.facts.snapshot import NodeInfo


class CountedDevice(StrEnum):
    """The device that is counted as in use: GPUs if the cluster has any."""

    GPU = "GPU"
    CPU = "CPU"


class WorkJob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One job. The scheduler sees everything but `run_s`. Its request's limit is never below `run_s`."""

    job_id: str
    submitted_at: float
    run_s: float
    request: ResourceRequest
    project: str = "default"
    user: str = ""
    name: str = ""
    queue: str = "default"
    priority: int = 0
    array_id: str | None = None
    array_at_once: int | None = None
    """How many of the jobs with its `array_id` run at the same time."""
    deadline_at: float | None = None


class NodeChange(msgspec.Struct, frozen=True, kw_only=True):
    """From `at` on the node has this `view`: new, larger, closed, or open again. None: the node is gone."""

    at: float
    name: str
    view: NodeInfo | None
    is_loss: bool = False
    """The node failed: it was not closed or removed on purpose."""


class WindowsChange(msgspec.Struct, frozen=True, kw_only=True):
    """From `at` on exactly these maintenance windows and reservations are declared."""

    at: float
    windows: tuple[Window, ...]


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    nodes: tuple[NodeInfo, ...]
    """The nodes before the first job."""
    jobs: Sequence[WorkJob]
    """In order of submission."""
    changes: Sequence[NodeChange] = ()
    """In order of time."""
    windows: Sequence[WindowsChange] = ()
    """In order of time."""
    projects: tuple[ProjectInfo, ...] = ()
    """Quotas and limits of projects. A project that is not named has neither."""

    @property
    def device(self) -> CountedDevice:
        return CountedDevice.GPU if any(node.gpus for node in self.nodes) else CountedDevice.CPU

    @property
    def capacity(self) -> float:
        """Devices of all nodes before the first job, open or not."""
        return sum(devices_of_node(node, self.device) for node in self.nodes)


def devices_of_node(node: NodeInfo, device: CountedDevice) -> float:
    return len(node.gpus) if device is CountedDevice.GPU else node.cpus


def devices_held(allocation: Allocation, device: CountedDevice) -> float:
    if device is CountedDevice.GPU:
        return sum([task.num_gpus for task in allocation])
    return sum([task.cpus for task in allocation])


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


class DeviceHoldings:
    """Every time that a job held devices, one row each: its index, the devices, from when to when."""

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


class SimulationOutcome:
    """Jobs by their index in the workload."""

    def __init__(self, workload: Workload) -> None:
        count = len(workload.jobs)
        self.workload = workload
        self.starts = array("d", [nan]) * count
        """When each job first started; NaN for a refused job."""
        self.ends = array("d", [nan]) * count
        self.refused: list[int] = []
        """Jobs that this cluster could never hold."""
        self.useful = 0.0
        """Device-seconds of work that was not lost."""
        self.lost = 0.0
        """Device-seconds of work since the last checkpoint that was lost when a job was stopped."""
        self.overhead = 0.0
        """Device-seconds in which checkpoints were written and read."""
        self.num_interrupted = 0
        """How often a job was stopped and queued again."""
        self.num_failures = 0
        """How often a node failed."""
        self.holdings = DeviceHoldings()
        self.timeline = Timeline()
