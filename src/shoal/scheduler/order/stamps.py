"""When each waiting job is due and what it scores, from its expected run time.

A job is stamped when it arrives, and again when ended runs of its kind have shown the expectation to be
wrong. Stamps are facts to a planner. They are recorded with decisions, so a decision can be replayed without
the runs that they were learned from.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import msgspec

from shoal.model.job import GpuRequest, ResourceRequest
from shoal.scheduler.facts.snapshot import Candidate, Holding, NodeInfo
from shoal.scheduler.order.due import due_for_deadline, due_time, latest_start, needs_restamp, score
from shoal.scheduler.prediction.forecast import UNKNOWN_S, Forecast, RunFeatures, RunTimeSpread

Kind = tuple[str, object, str]
"""Owner, shape and name: runs that are taken to be alike."""


class Stamps:
    """The waiting candidates by kind, and the forecast that stamps them."""

    def __init__(self) -> None:
        self.forecast = Forecast()
        self._cpus = self._gpus = 0.0
        self._waiting: dict[Kind, dict[str, Candidate]] = {}
        self._kinds: dict[str, Kind] = {}

    def see(self, nodes: Iterable[NodeInfo]) -> None:
        """Take the whole cluster as the measure of shares for later stamps."""
        infos = list(nodes)
        self._cpus = sum(view.cpus for view in infos)
        self._gpus = float(sum(len(view.gpus) for view in infos))

    def arrive(self, candidate: Candidate) -> Candidate:
        """Return the candidate with its stamps. It waits from now on."""
        stamped = self._stamped(candidate)
        if candidate.owner:
            kind = _kind(candidate, candidate.request)
            self._kinds[candidate.attempt_id] = kind
            self._waiting.setdefault(kind, {})[candidate.attempt_id] = stamped
        return stamped

    def leave(self, attempt_id: str) -> None:
        """The attempt does not wait any more. May be repeated."""
        kind = self._kinds.pop(attempt_id, None)
        if kind is not None:
            del self._waiting[kind][attempt_id]
            if not self._waiting[kind]:
                del self._waiting[kind]

    def ended(self, holding: Holding, request: ResourceRequest, run_s: float, now: float) -> list[Candidate]:
        """Note a run that ended by itself. Return the waiting candidates that are not due and whose stamps
        changed.
        """
        self.forecast.note(features_of(holding, request), run_s)
        changed = []
        last_features, expected_s = None, 0.0
        for attempt_id, waiting in self._waiting.get(_kind(holding, request), {}).items():
            if waiting.expected_s is None or waiting.due_at is None or waiting.due_at <= now:
                continue
            # Many waiting candidates of one kind were submitted together and have the same features.
            if last_features is not (features := features_of(waiting, waiting.request)):
                last_features, expected_s = features, self.forecast.expect(features).expected_s
            if needs_restamp(waiting.expected_s, expected_s):
                restamped = self._stamped(waiting)
                self._waiting[self._kinds[attempt_id]][attempt_id] = restamped
                changed.append(restamped)
        return changed

    def spread(self, attempt: Candidate | Holding) -> RunTimeSpread:
        """Return how long the attempt's run may take. Changes nothing, so any thread may call it."""
        request = attempt.request if isinstance(attempt, Candidate) else _request_of(attempt)
        runs, limit_s = self.forecast.runs(features_of(attempt, request)), request.time_limit_s
        expected_s = limit_s or (runs[-1] if runs else UNKNOWN_S)
        return RunTimeSpread(expected_s=expected_s, limit_s=limit_s, runs=runs)

    def _stamped(self, candidate: Candidate) -> Candidate:
        expectation = self.forecast.expect(features_of(candidate, candidate.request))
        task = self._share(candidate.request)
        due = due_time(candidate.submitted_at, expectation, task)
        if candidate.deadline_at is not None:
            limit_s = candidate.request.time_limit_s
            start_by = latest_start(candidate.deadline_at, limit_s, expectation.expected_s)
            due = due_for_deadline(candidate.submitted_at, start_by, due)
        return msgspec.structs.replace(
            candidate,
            expected_s=expectation.expected_s,
            due_at=due,
            score=score(expectation.expected_s, task),
        )

    def _share(self, request: ResourceRequest) -> float:
        """Return its part of all GPUs or of all CPUs, whichever is larger."""
        nodes, gpus = request.min_nodes, request.gpus
        by_gpus = nodes * gpus.count / self._gpus if gpus and self._gpus else 0.0
        by_cpus = nodes * request.cpus / self._cpus if self._cpus else 0.0
        return max(by_gpus, by_cpus)


def features_of(attempt: Candidate | Holding, request: ResourceRequest) -> RunFeatures:
    return _features(attempt.owner, attempt.project, attempt.name, request)


@lru_cache(maxsize=1 << 13)
def _features(owner: str, project: str, name: str, request: ResourceRequest) -> RunFeatures:
    return RunFeatures(
        user=owner or None,
        project=project,
        name=name or None,
        shape=_shape(request),
        limit_s=request.time_limit_s,
    )


def _request_of(holding: Holding) -> ResourceRequest:
    """Return what it must have asked for, with the fields that tell something about its run time."""
    task = holding.allocation[0]
    return ResourceRequest(
        min_nodes=len(holding.allocation),
        cpus=task.cpus,
        gpus=GpuRequest(count=len(task.gpu_ids)) if task.gpu_ids else None,
        time_limit_s=holding.time_limit_s,
    )


def _shape(request: ResourceRequest) -> tuple[int, float, int]:
    return request.min_nodes, request.cpus, request.gpus.count if request.gpus else 0


def _kind(attempt: Candidate | Holding, request: ResourceRequest) -> Kind:
    return attempt.owner, _shape(request), attempt.name
