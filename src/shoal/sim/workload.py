"""What a simulated cluster is given: nodes, and jobs with the run times that only the simulator knows.

A trace becomes a workload in `from_trace`; any other source of the same struct is as good.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from shoal.model.attempt import Allocation
from shoal.model.request import Request
from shoal.model.window import Window
from shoal.scheduler.devices import ProjectView
from shoal.scheduler.snapshot import NodeView


class Device(StrEnum):
    """What is counted as in use: GPUs where the cluster has any."""

    GPU = "GPU"
    CPU = "CPU"


class WorkJob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One job. The scheduler sees all of it but `run_s`, and its request's limit is never below that."""

    job_id: str
    submitted_at: float
    run_s: float
    request: Request
    project: str = "default"
    user: str = ""
    name: str = ""
    queue: str = "default"
    priority: int = 0
    array_id: str | None = None
    array_at_once: int | None = None
    """Of the jobs with its `array_id`, so many run at the same time."""
    deadline_at: float | None = None


class NodeChange(msgspec.Struct, frozen=True, kw_only=True):
    """From `at` on the node is as `view` says: new, larger, closed, open again. None: it is gone."""

    at: float
    name: str
    view: NodeView | None
    is_loss: bool = False
    """It failed: nobody closed it or took it away on purpose."""


class WindowsChange(msgspec.Struct, frozen=True, kw_only=True):
    """From `at` on these maintenance windows and reservations are declared, and no others."""

    at: float
    windows: tuple[Window, ...]


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    nodes: tuple[NodeView, ...]
    """As they are before the first job."""
    jobs: Sequence[WorkJob]
    """In order of submission."""
    changes: Sequence[NodeChange] = ()
    """In order of time."""
    windows: Sequence[WindowsChange] = ()
    """In order of time."""
    projects: tuple[ProjectView, ...] = ()
    """What projects are guaranteed and allowed; one that is not named has nothing of either."""

    @property
    def device(self) -> Device:
        return Device.GPU if any(node.gpus for node in self.nodes) else Device.CPU

    @property
    def capacity(self) -> float:
        """Devices of all nodes before the first job, open or not."""
        return sum(devices_of_node(node, self.device) for node in self.nodes)


def devices_of_node(node: NodeView, device: Device) -> float:
    return len(node.gpus) if device is Device.GPU else node.cpus


def devices_held(allocation: Allocation, device: Device) -> float:
    if device is Device.GPU:
        return sum([share.num_gpus for share in allocation])
    return sum([share.cpus for share in allocation])
