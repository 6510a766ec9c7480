"""When each waiting job is due and what it scores, from what is expected of its run: stamped when it comes,
and again when runs like it have shown the expectation to be wrong.

Stamps are facts to a planner. They are recorded with decisions, so that a decision can be made again by
somebody who never saw the runs they were learned from.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import msgspec

from shoal.model.request import GpuRequest, Request
from shoal.scheduler.deadline import due_for_deadline, latest_start
from shoal.scheduler.due import due_at, is_changed, score
from shoal.scheduler.expectation import Spread
from shoal.scheduler.forecast import UNKNOWN_S, Ask, Forecast
from shoal.scheduler.snapshot import Candidate, Holding, NodeView

Kind = tuple[str, object, str]
"""Owner, shape and name: runs that are taken to be alike."""


class Stamps:
    """Who waits, by kind, and the forecast they are stamped with."""

    def __init__(self) -> None:
        self.forecast = Forecast()
        self._cpus = self._gpus = 0.0
        self._waiting: dict[Kind, dict[str, Candidate]] = {}
        self._kinds: dict[str, Kind] = {}

    def see(self, nodes: Iterable[NodeView]) -> None:
        """The whole cluster, as later stamps measure shares by."""
        views = list(nodes)
        self._cpus = sum(view.cpus for view in views)
        self._gpus = float(sum(len(view.gpus) for view in views))

    def arrive(self, candidate: Candidate) -> Candidate:
        """It waits from now on: the candidate with its stamps."""
        stamped = self._stamped(candidate)
        if candidate.owner:
            kind = _kind(candidate, candidate.request)
            self._kinds[candidate.attempt_id] = kind
            self._waiting.setdefault(kind, {})[candidate.attempt_id] = stamped
        return stamped

    def leave(self, attempt_id: str) -> None:
        """It does not wait any more. May be repeated."""
        kind = self._kinds.pop(attempt_id, None)
        if kind is not None:
            del self._waiting[kind][attempt_id]
            if not self._waiting[kind]:
                del self._waiting[kind]

    def ended(self, holding: Holding, request: Request, run_s: float, now: float) -> list[Candidate]:
        """A run ended by itself: those who wait, are not due yet, and are now stamped otherwise."""
        self.forecast.note(ask_of(holding, request), run_s)
        changed = []
        ask, expected_s = None, 0.0
        for attempt_id, waiting in self._waiting.get(_kind(holding, request), {}).items():
            if waiting.expected_s is None or waiting.due_at is None or waiting.due_at <= now:
                continue
            # Many who wait alike came together, and are expected to run alike.
            if ask is not (asked := ask_of(waiting, waiting.request)):
                ask, expected_s = asked, self.forecast.expect(asked).expected_s
            if is_changed(waiting.expected_s, expected_s):
                again = self._stamped(waiting)
                self._waiting[self._kinds[attempt_id]][attempt_id] = again
                changed.append(again)
        return changed

    def spread(self, of: Candidate | Holding) -> Spread:
        """How long its run may take. Changes nothing: any thread may ask."""
        request = of.request if isinstance(of, Candidate) else _request_of(of)
        runs, limit_s = self.forecast.runs(ask_of(of, request)), request.time_limit_s
        expected_s = limit_s or (runs[-1] if runs else UNKNOWN_S)
        return Spread(expected_s=expected_s, limit_s=limit_s, runs=runs)

    def _stamped(self, candidate: Candidate) -> Candidate:
        expectation = self.forecast.expect(ask_of(candidate, candidate.request))
        share = self._share(candidate.request)
        due = due_at(candidate.submitted_at, expectation, share)
        if candidate.deadline_at is not None:
            limit_s = candidate.request.time_limit_s
            start_by = latest_start(candidate.deadline_at, limit_s, expectation.expected_s)
            due = due_for_deadline(candidate.submitted_at, start_by, due)
        return msgspec.structs.replace(
            candidate,
            expected_s=expectation.expected_s,
            due_at=due,
            score=score(expectation.expected_s, share),
        )

    def _share(self, request: Request) -> float:
        """The larger part of all GPUs or CPUs."""
        nodes, gpus = request.min_nodes, request.gpus
        by_gpus = nodes * gpus.count / self._gpus if gpus and self._gpus else 0.0
        by_cpus = nodes * request.cpus / self._cpus if self._cpus else 0.0
        return max(by_gpus, by_cpus)


def ask_of(of: Candidate | Holding, request: Request) -> Ask:
    return _ask(of.owner, of.project, of.name, request)


@lru_cache(maxsize=1 << 13)
def _ask(owner: str, project: str, name: str, request: Request) -> Ask:
    return Ask(
        user=owner or None,
        project=project,
        name=name or None,
        shape=_shape(request),
        limit_s=request.time_limit_s,
    )


def _request_of(holding: Holding) -> Request:
    """What it must have asked for, as far as that tells anything about its length."""
    share = holding.allocation[0]
    return Request(
        min_nodes=len(holding.allocation),
        cpus=share.cpus,
        gpus=GpuRequest(count=len(share.gpu_ids)) if share.gpu_ids else None,
        time_limit_s=holding.time_limit_s,
    )


def _shape(request: Request) -> tuple[int, float, int]:
    return request.min_nodes, request.cpus, request.gpus.count if request.gpus else 0


def _kind(of: Candidate | Holding, request: Request) -> Kind:
    return of.owner, _shape(request), of.name
