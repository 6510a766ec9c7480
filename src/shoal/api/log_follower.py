"""A job's logs as they are written, over all its attempts, until the job has ended and no lines are left."""

from __future__ import annotations

from collections.abc import AsyncIterator
from math import inf

import anyio
import msgspec

from shoal.api.call import Call
from shoal.api.http.sse import HEARTBEAT, HEARTBEAT_S, event
from shoal.api.log_pages import JobLogPage, LogFilter, LogPosition, read_page, read_tail
from shoal.api.views.render import checkpoint_of, render_written, status_of
from shoal.control.commands.explain import is_not_handed_over
from shoal.control.job_specs import spec_of
from shoal.engines.base import CLUSTER_UNREACHABLE
from shoal.errors import EngineUnreachable
from shoal.model.attempt import Attempt, AttemptState, EndReason
from shoal.model.job import Job

BATCH = 500
SHORTEST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
STILL_S = 5.0
STILL_PAUSE_S = 0.25
"""Shortest pause between two reads after a quiet time. Every commit of any caller is a reason to read, and on
a busy cluster 50 readers of quiet logs would read 800 times a second.
"""
PLACED_S = 2.0
"""How long an attempt waits in its cluster's queue before readers are told. By then the cluster has been
asked.
"""
ENDED_WELL = (EndReason.SUCCEEDED, EndReason.TIME_LIMIT)
LATE_LINES_S = 3.0
"""How long after an attempt's end we still ask a node that has not reported its log as complete."""


class LogFollowRequest(msgspec.Struct, frozen=True):
    """Where a reader begins."""

    job_id: str
    position: LogPosition | None
    is_resumed: bool
    """The reader has seen the announcement of the position's attempt."""
    lines: LogFilter
    tail: int | None


async def follow(call: Call, wanted: LogFollowRequest) -> AsyncIterator[bytes]:
    """Yield events: `placed` (the attempt waits in the cluster's queue, or for its answer), `attempt` (it
    runs), `line`, `again` (before the next attempt) and at last `end`.

    Comments in between keep a quiet stream open.
    """
    follower = _Follower(call, wanted)
    while True:
        chunk, is_over = await follower.turn()
        if chunk:
            yield chunk
        if is_over:
            return


class _Follower:
    def __init__(self, call: Call, wanted: LogFollowRequest) -> None:
        self._core = call.core
        self._changed = call.core.signals.commits
        self._wanted = wanted
        self._position = wanted.position
        self._announced = wanted.position.epoch if wanted.position and wanted.is_resumed else None
        self._waits_since: dict[int, float] = {}
        """By attempt that its cluster lets wait: since when. Infinity once the reader was told."""
        self._tail = wanted.tail
        self._pause_s = SHORTEST_PAUSE_S
        self._quiet_since = self._core.records.clock.monotonic()
        self._ended_since: float | None = None
        self._news_at = self._quiet_since

    async def turn(self) -> tuple[bytes, bool]:
        """What to send now, and whether that was all."""
        job, attempts = await self._load()
        attempt = self._current(attempts)
        if attempt is None:
            return b"", True
        before = self._position
        page, lines = await self._read(attempt)
        out = self._announce(attempt, has_lines=bool(lines)) + b"".join(lines)
        if self._position == before and self._is_finished(attempt, page):
            later = [other for other in attempts if other.epoch > attempt.epoch]
            if later:
                out += self._next_attempt(attempt, min(later, key=lambda other: other.epoch))
            elif not job.is_open:
                return out + self._end(job, attempt), True
        if self._position == before and not out:
            return await self._wait(), False
        self._pause_s = SHORTEST_PAUSE_S
        self._news_at = self._core.records.clock.monotonic()
        return out, False

    async def _load(self) -> tuple[Job, list[Attempt]]:
        job_id = self._wanted.job_id
        job, attempts = await self._core.records.store.read(
            lambda tx: (tx.jobs.get(job_id), tx.attempts.of_job(job_id))
        )
        assert job is not None
        return job, attempts

    def _current(self, attempts: list[Attempt]) -> Attempt | None:
        if self._position is None and attempts:
            self._position = LogPosition(max(attempt.epoch for attempt in attempts))
        epoch = self._position.epoch if self._position else None
        return next((attempt for attempt in attempts if attempt.epoch == epoch), None)

    def _announce(self, attempt: Attempt, *, has_lines: bool) -> bytes:
        """Announce an attempt once it runs or has lines; before that, announce that the cluster
        lets it wait.
        """
        if self._announced == attempt.epoch or not attempt.node_names:
            return b""
        is_unbegun = attempt.started_at is None and attempt.state is not AttemptState.RUNNING
        if is_unbegun and not has_lines:
            return self._announce_waiting(attempt) if attempt.state is AttemptState.STARTING else b""
        self._announced = attempt.epoch
        data = {"epoch": attempt.epoch, "nodes": list(attempt.node_names)}
        return event("attempt", data, str(LogPosition(attempt.epoch)))

    def _announce_waiting(self, attempt: Attempt) -> bytes:
        """Announce once that the attempt waits. The event has no position, so a reader who reconnects gets it
        again.
        """
        waits = self._core.running.leases.queue_reasons(attempt.attempt_id)
        if is_not_handed_over(self._core.running, self._core.link.outages, attempt):
            waits = (CLUSTER_UNREACHABLE,)
        now = self._core.records.clock.monotonic()
        if not waits or now - self._waits_since.setdefault(attempt.epoch, now) < PLACED_S:
            return b""
        self._waits_since[attempt.epoch] = inf
        nodes = list(attempt.node_names)
        return event("placed", {"epoch": attempt.epoch, "nodes": nodes, "waits": list(waits)})

    async def _read(self, attempt: Attempt) -> tuple[JobLogPage, list[bytes]]:
        assert self._position is not None
        engine, lines = self._core.link.engine, self._wanted.lines
        is_tail = self._tail is not None and bool(attempt.node_names)
        try:
            if is_tail and self._tail is not None:
                page = await read_tail(engine, attempt, lines, self._tail)
                self._tail = None
            else:
                page = await read_page(engine, attempt, self._position, BATCH, lines)
        except EngineUnreachable:
            return JobLogPage([], self._position, is_complete=False), []
        return page, self._lines(page, is_tail=is_tail)

    def _lines(self, page: JobLogPage, *, is_tail: bool) -> list[bytes]:
        """Each line with the cursor after it, so that a broken stream continues exactly there.

        A tail skips earlier lines, so a stream can only continue from the end of a tail.
        """
        assert self._position is not None
        known_offsets = self._position.offsets
        offsets = [*known_offsets, *(0 for _ in page.position.offsets[len(known_offsets) :])]
        self._position = page.position
        out = []
        for line in page.lines:
            offsets[line.node_index] = line.next_offset
            here = None if is_tail else str(LogPosition(page.position.epoch, tuple(offsets)))
            out.append(event("line", line.view, here))
        if is_tail and page.lines:
            out[-1] = event("line", page.lines[-1].view, str(page.position))
        return out

    def _is_finished(self, attempt: Attempt, page: JobLogPage) -> bool:
        if attempt.state is not AttemptState.ENDED:
            self._ended_since = None
            return False
        now = self._core.records.clock.monotonic()
        self._ended_since = now if self._ended_since is None else self._ended_since
        return page.is_complete or now - self._ended_since > LATE_LINES_S

    def _next_attempt(self, ended: Attempt, following: Attempt) -> bytes:
        """Turn to the next attempt and report how the last one ended. A reader who reconnects
        gets it again.
        """
        is_waiting = following.state is AttemptState.QUEUED
        data = {
            "epoch": ended.epoch,
            "nodes": list(ended.node_names),
            "reason": ended.reason.value if ended.reason else None,
            "exit_code": ended.exit_code,
            "message": ended.message,
            "again_in_s": self._core.backoff.remaining_s(following) if is_waiting else None,
        }
        message = event("again", data, str(self._position))
        self._position = LogPosition(following.epoch)
        self._ended_since = None
        return message

    def _end(self, job: Job, attempt: Attempt) -> bytes:
        data: dict[str, object] = {
            "status": status_of(job, attempt),
            "exit_code": job.exit_code,
            "because": job.because,
        }
        ranks = len(attempt.node_names) * job.request.ranks_per_node
        may_be_copies = attempt.reason in ENDED_WELL and self._core.running.worlds.of(attempt) is None
        if ranks > 1 and may_be_copies and job.replica is None and spec_of(job).world != "any":
            data["ranks_without_group"] = ranks
        written = render_written(attempt)
        if written is not None:
            data["written"] = {**written, "checkpoint": checkpoint_of(job)}
        return event("end", data, str(self._position))

    async def _wait(self) -> bytes:
        """Wait until a commit or the end of a pause. Return a comment after a long quiet time."""
        is_still = self._core.records.clock.monotonic() - self._news_at > STILL_S
        await anyio.sleep(STILL_PAUSE_S if is_still else SHORTEST_PAUSE_S)
        await self._changed.wait(self._pause_s)
        self._pause_s = min(self._pause_s * 1.5, LONGEST_PAUSE_S)
        now = self._core.records.clock.monotonic()
        if now - self._quiet_since < HEARTBEAT_S:
            return b""
        self._quiet_since = now
        return HEARTBEAT
