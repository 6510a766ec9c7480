"""Events as facts for a planner: attempts that wait, hold and end; nodes, projects; and recorded decisions.

Reads only the log. An event of a kind that planners never see becomes no fact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from shoal.control.memory.planner_input import candidate, node_view
from shoal.control.project_tree import project_view
from shoal.model.attempt import Allocation, Attempt, NodeTask
from shoal.model.from_spec import request_of
from shoal.model.job import ArrayElement, Dependency, Job, JobOutcome
from shoal.model.node import Node, NodeFacts, NodeState, Window
from shoal.model.people import Project
from shoal.scheduler import Candidate, Eviction, NodeInfo, PlannedReplacement, PlannedStart, Policy
from shoal.scheduler.facts.amounts import ProjectInfo
from shoal.scheduler.order.fair_share import Usage
from shoal.spec import JobSpec

Event = Mapping[str, Any]
"""An event as the API and `shoal events --json` print it."""


class QueuedFact(msgspec.Struct, frozen=True):
    """An attempt waits. The jobs that it depends on may still be open."""

    candidate: Candidate
    after: tuple[Dependency, ...]
    backoff_s: float


class PlacementFact(msgspec.Struct, frozen=True):
    attempt_id: str
    allocation: Allocation
    at: float


class TaskMoveFact(msgspec.Struct, frozen=True):
    """One of its tasks was lost with its node, and continues on another node."""

    attempt_id: str
    lost: str
    task: NodeTask


class StopFact(msgspec.Struct, frozen=True):
    """An attempt that holds resources was asked to stop."""

    attempt_id: str
    grows_to: int | None = None


class AttemptEndFact(msgspec.Struct, frozen=True):
    """An attempt no longer waits or holds anything."""

    attempt_id: str
    at: float


class JobEndFact(msgspec.Struct, frozen=True):
    job_id: str
    outcome: JobOutcome


class NodeFact(msgspec.Struct, frozen=True):
    view: NodeInfo
    at: float
    is_lost: bool
    """The node does not answer, or was declared dead. It was not closed on purpose."""


class NodeRemovalFact(msgspec.Struct, frozen=True):
    name: str
    at: float


class ProjectsFact(msgspec.Struct, frozen=True):
    views: tuple[ProjectInfo, ...]


class WindowsFact(msgspec.Struct, frozen=True):
    windows: tuple[Window, ...]
    at: float


class PolicyFact(msgspec.Struct, frozen=True):
    policy: Policy


class RecordedDecision(msgspec.Struct, frozen=True):
    """A recorded plan that started or stopped at least one attempt, or decided about a lost task."""

    seq: int
    at: float
    seen: int
    """The plan saw the log up to this event."""
    starts: tuple[PlannedStart, ...]
    placed: tuple[str, ...]
    """The starts and replacements that were still possible when the plan was written."""
    evictions: tuple[Eviction, ...]
    saved: dict[str, float]
    """Checkpoints reported since the last decision that stopped an attempt."""
    is_all_saved: bool
    """No other checkpoints were known, whatever was recorded before."""
    usages: tuple[Usage, ...]
    """The use of all projects that had any, if it may have decided; else empty."""
    resting: frozenset[str]
    stamps: dict[str, tuple[float | None, float | None, float | None]]
    """Stamps of attempts since the last decision: expected run time, when it is due, its score."""
    replacements: tuple[PlannedReplacement, ...] = ()


Fact = (
    QueuedFact
    | PlacementFact
    | TaskMoveFact
    | StopFact
    | AttemptEndFact
    | JobEndFact
    | NodeFact
    | NodeRemovalFact
    | ProjectsFact
    | WindowsFact
    | PolicyFact
    | RecordedDecision
)


def facts_of(events: Iterable[Event]) -> Iterator[tuple[int, Fact]]:
    """The facts in the order of the log, each with the number of its event."""
    reader = _Reader()
    for event in events:
        read = READERS.get(str(event["kind"]))
        fact = read(reader, event) if read else None
        if fact is not None:
            yield int(event["seq"]), fact


class _Reader:
    """Remembers what later events leave out because an earlier one contained it."""

    def __init__(self) -> None:
        self._specs: dict[str, str] = {}
        """By array: its first element has the spec of all elements."""
        self._jobs: dict[str, Job] = {}
        self._nodes: dict[str, Node] = {}
        self._projects: dict[str, Project] = {}
        self._windows: dict[str, Window] = {}
        self._parts: list[dict[str, Any]] = []
        """Parts of the decision that comes next."""

    def submitted(self, event: Event) -> Fact:
        data, project = event["data"], str(event["project"])
        array_id = data.get("array_id")
        text = data.get("spec") or self._specs[array_id]
        if array_id is not None:
            self._specs[array_id] = text
        spec = JobSpec.model_validate_json(text)
        array = None
        if array_id is not None and spec.array is not None:
            array = ArrayElement(array_id=array_id, index=0, size=0, at_once=spec.array.at_once)
        job = Job(
            job_id=str(event["job_id"]),
            project=project,
            number=data["number"],
            name=data["name"],
            owner=str(event["actor"]),
            owner_name="",
            queue=spec.queue,
            priority=data["priority"],
            request=request_of(spec),
            spec_json=text,
            after=msgspec.convert(
                [{"label": "", **dep} for dep in data.get("after", ())], tuple[Dependency, ...]
            ),
            array=array,
            submitted_at=data.get("submitted_at", event["at"]),
            deadline_at=data.get("deadline_at"),
        )
        self._jobs[job.job_id] = job
        return self._queued(job, event, 0.0)

    def tried_again(self, event: Event) -> Fact:
        data, job = event["data"], self._jobs[str(event["job_id"])]
        if data.get("excluded_nodes"):
            job = msgspec.structs.replace(job, excluded_nodes=tuple(data["excluded_nodes"]))
        job = msgspec.structs.replace(job, avoided_nodes=tuple(data.get("avoided_nodes", ())))
        if event["kind"] == "job.retried":
            job = msgspec.structs.replace(job, evictions=0)
        self._jobs[job.job_id] = job
        return self._queued(job, event, data.get("backoff_s", 0.0))

    def evicted(self, event: Event) -> None:
        """Count an eviction. The attempts that wait again after it carry the count."""
        job = self._jobs[str(event["job_id"])]
        self._jobs[job.job_id] = msgspec.structs.replace(job, evictions=job.evictions + 1)

    def _queued(self, job: Job, event: Event, backoff_s: float) -> QueuedFact:
        attempt = Attempt(
            attempt_id=str(event["attempt_id"]),
            job_id=job.job_id,
            project=job.project,
            epoch=1,
            queued_at=event["at"],
            backoff_s=backoff_s,
        )
        return QueuedFact(candidate(job, attempt), job.after, backoff_s)

    def placed(self, event: Event) -> Fact:
        allocation = msgspec.convert(event["data"]["event"]["allocation"], Allocation)
        return PlacementFact(str(event["attempt_id"]), allocation, event["at"])

    def moved(self, event: Event) -> Fact | None:
        change = event["data"]["event"]
        task = change.get("task")
        if task is None or task["node"] == change["failure"]["node"]:
            return None
        where = msgspec.convert(task, NodeTask)
        return TaskMoveFact(str(event["attempt_id"]), change["failure"]["node"], where)

    def leaving(self, event: Event) -> Fact:
        stop = event["data"].get("event") or {}
        return StopFact(str(event["attempt_id"]), stop.get("grows_to"))

    def over(self, event: Event) -> Fact:
        return AttemptEndFact(str(event["attempt_id"]), event["at"])

    def job_over(self, event: Event) -> Fact:
        return JobEndFact(str(event["job_id"]), JobOutcome(event["data"]["outcome"]))

    def node_facts(self, event: Event) -> Fact:
        facts = msgspec.convert(event["data"], NodeFacts)
        before = self._nodes.get(facts.name)
        node = msgspec.structs.replace(before, facts=facts) if before else Node(facts=facts, engine="")
        return self._node(node, event)

    def node_state(self, event: Event) -> Fact | None:
        node = self._nodes.get(str(event["node"]))
        if node is None:
            return None
        return self._node(msgspec.structs.replace(node, state=NodeState(event["data"]["to"])), event)

    def node_alive(self, event: Event) -> Fact | None:
        node = self._nodes.get(str(event["node"]))
        if node is None:
            return None
        facts = msgspec.structs.replace(node.facts, is_alive=event["kind"] == "node.answers")
        return self._node(msgspec.structs.replace(node, facts=facts), event)

    def node_busy(self, event: Event) -> Fact | None:
        node = self._nodes.get(str(event["node"]))
        if node is None:
            return None
        facts = msgspec.structs.replace(node.facts, is_busy=event["kind"] == "node.busy")
        return self._node(msgspec.structs.replace(node, facts=facts), event)

    def node_listed(self, event: Event) -> Fact | None:
        node = self._nodes.get(str(event["node"]))
        if node is None:
            return None
        return self._node(msgspec.structs.replace(node, is_gone=event["kind"] == "node.gone"), event)

    def node_removed(self, event: Event) -> Fact:
        self._nodes.pop(str(event["node"]), None)
        return NodeRemovalFact(str(event["node"]), event["at"])

    def _node(self, node: Node, event: Event) -> NodeFact | NodeRemovalFact:
        self._nodes[node.name] = node
        if node.is_gone:
            return NodeRemovalFact(node.name, event["at"])
        is_lost = not node.facts.answers or node.state is NodeState.DEAD
        return NodeFact(node_view(node), event["at"], is_lost)

    def project(self, event: Event) -> Fact:
        data = dict(event["data"])
        name = data.pop("project")
        project = self._projects.get(name) or Project(name=name, uid=0)
        fields = {**msgspec.to_builtins(project), **data}
        self._projects[name] = msgspec.convert(fields, Project)
        return ProjectsFact(tuple(project_view(project) for project in self._projects.values()))

    def window(self, event: Event) -> Fact:
        window = msgspec.convert(event["data"], Window)
        if event["kind"] == "window.added":
            # Declaring a window discards those that are over, and a clock may be set back after that.
            kept = {key: window for key, window in self._windows.items() if window.until_at > event["at"]}
            self._windows = {**kept, window.window_id: window}
        else:
            self._windows.pop(window.window_id, None)
        return WindowsFact(tuple(self._windows.values()), event["at"])

    def policy(self, event: Event) -> Fact:
        return PolicyFact(msgspec.convert(event["data"], Policy))

    def part(self, event: Event) -> None:
        self._parts.append(event["data"])

    def decision(self, event: Event) -> Fact | None:
        data = event["data"]
        if self._parts:
            data, self._parts = _joined_parts([*self._parts, data]), []
        if "stamps" not in data:
            return None  # older than decisions that can be made again
        return RecordedDecision(
            seq=int(event["seq"]),
            at=event["at"],
            seen=data["seen"],
            starts=msgspec.convert(data["starts"], tuple[PlannedStart, ...]),
            placed=tuple(data["placed"]),
            evictions=msgspec.convert(data.get("evictions", ()), tuple[Eviction, ...]),
            saved=data.get("saved", {}),
            is_all_saved=data.get("is_all_saved", False),
            usages=msgspec.convert(data.get("usages", ()), tuple[Usage, ...]),
            resting=frozenset(data["resting"]),
            stamps={attempt_id: tuple(stamps) for attempt_id, stamps in data["stamps"].items()},
            replacements=msgspec.convert(data.get("replacements", ()), tuple[PlannedReplacement, ...]),
        )


def _joined_parts(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Join a decision whose lists and mappings were split."""
    whole = dict(parts[-1])
    for key, last in parts[-1].items():
        if isinstance(last, list):
            whole[key] = [entry for part in parts for entry in part[key]]
        elif isinstance(last, dict):
            whole[key] = {index: entry for part in parts for index, entry in part[key].items()}
    return whole


READERS: dict[str, Callable[[_Reader, Event], Fact | None]] = {
    "job.submitted": _Reader.submitted,
    "job.retrying": _Reader.tried_again,
    "job.retried": _Reader.tried_again,
    "job.ended": _Reader.job_over,
    "job.evicted": _Reader.evicted,
    "attempt.placed": _Reader.placed,
    "attempt.regrouped": _Reader.moved,
    "attempt.stopping": _Reader.leaving,
    "attempt.ended": _Reader.over,
    "node.added": _Reader.node_facts,
    "node.changed": _Reader.node_facts,
    "node.answers": _Reader.node_alive,
    "node.silent": _Reader.node_alive,
    "node.busy": _Reader.node_busy,
    "node.idle": _Reader.node_busy,
    "node.gone": _Reader.node_listed,
    "node.back": _Reader.node_listed,
    "node.removed": _Reader.node_removed,
    "project.created": _Reader.project,
    "project.updated": _Reader.project,
    "window.added": _Reader.window,
    "window.cancelled": _Reader.window,
    "policy.set": _Reader.policy,
    "plan.part": _Reader.part,
    "plan.made": _Reader.decision,
    **{f"node.{state}": _Reader.node_state for state in NodeState},
}
