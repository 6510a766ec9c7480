"""Throw away what nobody needs any more: old answers, archives, logs, metrics, checkpoints. Never an event.

Every turn looks at what is there and may stop at any instruction: what it left, the next turn finds.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

import anyio.to_thread
import structlog

from shoal.control.core import Core
from shoal.control.restored import RESTORED_AT
from shoal.control.services.models import served_jobs
from shoal.control.tokens import forget_ended, has_ended_long_ago
from shoal.control.usage import write_down
from shoal.engines.base import SupportsPrune
from shoal.errors import EngineUnreachable
from shoal.model.job import Job
from shoal.store import JobFilter, Tx

DAY_S = 86400.0
KEEP_KEYS_S = 7 * DAY_S
KEEP_ARCHIVES_S = 7 * DAY_S
KEEP_PARTS_S = DAY_S
KEEP_LEFT_BEHIND_S = 30 * DAY_S
PAGE = 500
MAX_DROPPED = 1000
"""Rows that one transaction removes. Of larger or smaller rows, others below: none takes 0.1 s."""
MAX_LISTS_DROPPED = 200
"""Each has up to 36 KB."""
MAX_TOKENS_DROPPED = 200
"""Each is read, and named in an event."""
MAX_POINTS_DROPPED = 5000
MAX_METRIC_ROWS = 10_000_000
"""Of all jobs together: some 1.7 GB in SQLite, by 166 bytes a row. More where those that run have more."""
OPEN = ("queued", "starting", "running", "stopping")
_ARCHIVE = re.compile(r"[0-9a-f]{64}\.tar")

log = structlog.get_logger()


async def clean(core: Core) -> None:
    """One turn. What cannot be done now is done by a later one."""
    now = core.clock.now()
    await _in_batches(core, lambda tx: tx.keys.purge(now - KEEP_KEYS_S, MAX_DROPPED), MAX_DROPPED)
    await core.store.write(lambda tx: tx.daily_counts.purge(now))
    await _in_batches(
        core, lambda tx: tx.left_behind.purge(now - KEEP_LEFT_BEHIND_S, MAX_LISTS_DROPPED), MAX_LISTS_DROPPED
    )
    await write_down(core)
    await _clean_tokens(core, now)
    await _clean_archives(core, now)
    await _clean_metrics(core, now)
    engine = core.engine
    if isinstance(engine, SupportsPrune):
        try:
            await engine.prune(now - core.settings.keep_logs_s, core.settings.max_kept_bytes)
            await _clean_checkpoints(core, engine, now)
        except EngineUnreachable as error:
            log.warning("engine.unreachable", engine=engine.name, error=error.message)


async def _in_batches(core: Core, remove: Callable[[Tx], int], most: int) -> None:
    """Remove until a batch is not full. The writes of others come in between."""
    while await core.store.write(remove) == most:
        pass


async def _clean_tokens(core: Core, now: float) -> None:
    """Those that ended long ago. No living token was made with one of them: it would have ended too."""
    if await core.store.read(lambda tx: has_ended_long_ago(tx.tokens.all(), now)):
        await _in_batches(core, lambda tx: forget_ended(tx, now, MAX_TOKENS_DROPPED), MAX_TOKENS_DROPPED)


async def _clean_archives(core: Core, now: float) -> None:
    """Archives that no open job or service uses and nobody asked for in a week; uploads that never ended."""
    folder = core.settings.state_dir / "archives"
    old = await anyio.to_thread.run_sync(_old_archives, folder, now)
    # Most of the time there is none, and then nobody has to look through the open jobs.
    used = await core.store.read(_archives_in_use) if old else frozenset()
    await anyio.to_thread.run_sync(_drop_archives, folder, old - used, now)


def _old_archives(folder: Path, now: float) -> set[str]:
    """Digests, by their age."""
    if not folder.is_dir():
        return set()
    for part in folder.glob(".part-*"):
        if _is_older(part, now - KEEP_PARTS_S):
            part.unlink(missing_ok=True)
    files = (path for path in folder.iterdir() if _ARCHIVE.fullmatch(path.name))
    return {path.stem for path in files if _is_older(path, now - KEEP_ARCHIVES_S)}


def _drop_archives(folder: Path, digests: Collection[str], now: float) -> None:
    """The right to use it goes first: who uses it dates it anew and then looks whether the right is there.

    So either they see that it is gone and send it again, or we see the new date and leave it.
    """
    for digest in digests:
        for mark in folder.glob(f"owners/*/{digest}"):
            mark.unlink(missing_ok=True)
        path = folder / f"{digest}.tar"
        if _is_older(path, now - KEEP_ARCHIVES_S):
            path.unlink(missing_ok=True)


def _is_older(path: Path, than: float) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime < than
    return False


def _archives_in_use(tx: Tx) -> frozenset[str]:
    return frozenset(_digests(tx))


def _digests(tx: Tx) -> Iterator[str]:
    for service in tx.services.all():
        releases = tx.services.releases(service.service_id)
        yield from (one.archive_digest for one in releases if one.archive_digest is not None)
    before = None
    while page := tx.jobs.page(JobFilter(statuses=OPEN), before, PAGE):
        yield from (job.archive_digest for job, _ in page if job.archive_digest is not None)
        last = page[-1][0]
        before = (last.submitted_at, last.job_id)


async def _clean_metrics(core: Core, now: float) -> None:
    """Those of jobs that ended long ago, with their logs."""
    before = now - core.settings.keep_logs_s
    for job_id in await core.store.read(lambda tx: tx.metrics.silent(before, PAGE)):
        job = await core.store.read(partial(_job, job_id))
        if job is None or (job.ended_at is not None and job.ended_at < before):
            await _drop_metrics(core, job_id)
    await _bound_metrics(core)


async def _bound_metrics(core: Core) -> None:
    """Where all together are too many: of jobs that ended, the oldest first. Of an open one nothing goes:
    it has a bound of its own, and there may be as many rows more as open jobs have.
    """
    excess = await core.store.read(lambda tx: tx.metrics.num_rows()) - MAX_METRIC_ROWS
    num_kept = 0
    while excess > 0 and (page := await core.store.read(partial(_oldest_metrics, num_kept))):
        for job_id, num_rows in page:
            job = await core.store.read(partial(_job, job_id))
            if job is not None and job.ended_at is None:
                num_kept += 1
                continue
            await _drop_metrics(core, job_id)
            log.info("metrics.dropped", job_id=job_id, rows=num_rows)
            excess -= num_rows
            if excess <= 0:
                return


def _oldest_metrics(skip: int, tx: Tx) -> list[tuple[str, int]]:
    return tx.metrics.oldest(skip, PAGE)


async def _drop_metrics(core: Core, job_id: str) -> None:
    """One job may have half a million points."""
    while not await core.store.write(lambda tx: tx.metrics.drop(job_id, MAX_POINTS_DROPPED)):
        pass


async def _clean_checkpoints(core: Core, engine: SupportsPrune, now: float) -> None:
    """Those of jobs that ended long ago and that no service serves. A directory that is no job's is not ours
    to remove.
    """
    before = now - core.settings.keep_logs_s
    restored_at = await _restored_at(core)
    for job_id in await engine.checkpoints():
        job = await core.store.read(partial(_job, job_id))
        if job is None or job.ended_at is None or job.ended_at >= before:
            continue
        if job.submitted_at < restored_at:
            continue  # the home that this one was copied from has the same job, and may need them
        if job_id not in await core.store.read(lambda tx: frozenset(served_jobs(tx))):
            try:
                await engine.drop_checkpoint(job_id)
            except EngineUnreachable as error:  # the others may go all the same
                log.warning("clean.checkpoint_stays", job=job_id, error=error.message)


async def _restored_at(core: Core) -> float:
    """When a copied home began to share the cluster's checkpoint directory with its original; 0: never."""
    if core.settings.engine == "local":
        return 0.0  # its checkpoints are in the home, and were copied with it
    restored_at = await core.store.read(lambda tx: tx.meta.get(RESTORED_AT))
    return float(restored_at or 0.0)


def _job(job_id: str, tx: Tx) -> Job | None:
    return tx.jobs.get(job_id)
