"""Predictions of starts: run times learned at the start of a control plane, and outlooks that people were
given.

A control plane that starts reads the last runs from the log to learn run times. It remembers each outlook
until the job starts, to calibrate the next ones. Only in memory.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from shoal.control.memory.planner_input import holding
from shoal.errors import LimitReached
from shoal.model.attempt import Attempt, EndReason
from shoal.model.job import Job
from shoal.scheduler import Stamps
from shoal.scheduler.order.stamps import features_of
from shoal.scheduler.prediction.calibration import Calibration, Interval
from shoal.scheduler.prediction.scenarios import StartSpan
from shoal.store import EventFilter, Tx

NATURAL_ENDS = frozenset(
    {EndReason.SUCCEEDED, EndReason.EXIT, EndReason.SIGNAL, EndReason.OOM, EndReason.TIME_LIMIT}
)
"""Ends that show how long such a run takes: nothing stopped it and nothing was lost."""
MAX_EVENTS = 50_000
MAX_RUNS = 2_000
"""Read at a start, so that it takes less than a second. Older runs are forgotten."""
ENDED = EventFilter(kinds_prefix="attempt.ended")


def last_runs(tx: Tx) -> list[tuple[Job, Attempt]]:
    """Return runs that ended by themselves, the oldest first."""
    events = tx.events.page(max(tx.events.head().seq - MAX_EVENTS, 0), ENDED, MAX_EVENTS)
    runs = []
    for event in events[-MAX_RUNS:]:
        attempt = tx.attempts.get(event.attempt_id) if event.attempt_id else None
        job = tx.jobs.get(attempt.job_id) if attempt else None
        if attempt is not None and job is not None and attempt.reason in NATURAL_ENDS:
            runs.append((job, attempt))
    return runs


def learn_run_times(stamps: Stamps, runs: list[tuple[Job, Attempt]]) -> None:
    for job, attempt in runs:
        if attempt.placed_at is not None and attempt.ended_at is not None:
            features = features_of(holding(job, attempt), job.request)
            stamps.forecast.note(features, attempt.ended_at - attempt.placed_at)


MAX_PENDING = 10_000
"""Outlooks that are remembered until their jobs start. If there are more, the oldest are forgotten."""

MAX_ASKING = 8
"""Questions that may wait while one is answered, which takes seconds. Further questions are refused."""
MAX_EACH = 3
"""Questions of one person, including the one being answered, so that no person's script crowds out the
others.
"""
TOO_MANY_TEXT = "wait to be answered; this one is too many"
RETRY_HINT = "ask again in a few seconds"


class _Prediction(NamedTuple):
    at: float
    span: StartSpan
    interval: Interval


class StartPredictions:
    """Outlooks that were given. Each job counts once, with its first outlook, so asking every second teaches
    nothing more.
    """

    def __init__(self) -> None:
        self.calibration = Calibration()
        self._turn = asyncio.Lock()
        self._asking: Counter[str] = Counter()
        """Number of questions by actor."""
        self._predictions: dict[str, _Prediction] = {}

    def __contains__(self, attempt_id: str) -> bool:
        return attempt_id in self._predictions

    @property
    def is_idle(self) -> bool:
        return not self._asking

    @asynccontextmanager
    async def one_at_a_time(self, actor_id: str) -> AsyncIterator[None]:
        """Answer one question at a time, because each takes a thread. `LimitReached`: too many questions wait
        already, or too many of this actor.
        """
        if self._asking.total() > MAX_ASKING:
            raise LimitReached(f"{MAX_ASKING} questions about starts {TOO_MANY_TEXT}", hint=RETRY_HINT)
        if self._asking[actor_id] >= MAX_EACH:
            raise LimitReached(f"{MAX_EACH} of your questions about starts {TOO_MANY_TEXT}", hint=RETRY_HINT)
        self._asking[actor_id] += 1
        try:
            async with self._turn:
                yield
        finally:
            self._asking[actor_id] -= 1
            self._asking += Counter()  # drops actors with a count of 0

    def remember(self, attempt_id: str, span: StartSpan, interval: Interval, now: float) -> None:
        if attempt_id in self._predictions:
            return
        if len(self._predictions) >= MAX_PENDING:
            del self._predictions[next(iter(self._predictions))]
        self._predictions[attempt_id] = _Prediction(now, span, interval)

    def note_start(self, attempt_id: str, now: float) -> None:
        prediction = self._predictions.pop(attempt_id, None)
        if prediction is not None:
            self.calibration.note(prediction.span, prediction.interval, now - prediction.at)
