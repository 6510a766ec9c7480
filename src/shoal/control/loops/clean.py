"""Remove old data: idempotency replies, archives, logs, metrics, checkpoints. Never an event.

Every turn looks at what is there and may stop at any instruction. The next turn finds what is left.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

import anyio.to_thread
import structlog

from shoal.control.capabilities import Records
from shoal.control.commands.tokens import forget_ended, has_ended_long_ago
from shoal.control.loops.project_usage import write_usage
from shoal.control.restored import RESTORED_AT
from shoal.control.services.release_checks import served_jobs
from shoal.engines.base import Engine, SupportsPrune
from shoal.errors import EngineUnreachable
from shoal.model.job import Job
from shoal.scheduler import Planner
from shoal.settings import Settings
from shoal.store import JobFilter, Store, Tx

DAY_S = 86400.0
KEEP_KEYS_S = 7 * DAY_S
KEEP_ARCHIVES_S = 7 * DAY_S
KEEP_PARTS_S = DAY_S
KEEP_LEFT_BEHIND_S = 30 * DAY_S
PAGE = 500
MAX_DROPPED = 1000
"""Rows that one transaction removes. Larger or smaller rows have limits of their own below: no removal takes
0.1 s.
"""
MAX_LISTS_DROPPED = 200
"""Each list has up to 36 KB."""
MAX_TOKENS_DROPPED = 200
"""Each token is read and named in an event."""
MAX_POINTS_DROPPED = 5000
MAX_METRIC_ROWS = 10_000_000
"""Rows of all jobs together: some 1.7 GB in SQLite at 166 bytes a row. Open jobs may exceed the limit."""
OPEN_STATUSES = ("queued", "starting", "running", "stopping")
_ARCHIVE = re.compile(r"[0-9a-f]{64}\.tar")

log = structlog.get_logger()


async def clean(records: Records, planner: Planner, engine: Engine, settings: Settings) -> None:
    """Run one turn. A later turn does what cannot be done now."""
    now = records.clock.now()
    await _in_batches(records.store, lambda tx: tx.keys.purge(now - KEEP_KEYS_S, MAX_DROPPED), MAX_DROPPED)
    await records.store.write(lambda tx: tx.daily_counts.purge(now))
    await _in_batches(
        records.store,
        lambda tx: tx.left_behind.purge(now - KEEP_LEFT_BEHIND_S, MAX_LISTS_DROPPED),
        MAX_LISTS_DROPPED,
    )
    await write_usage(records.store, planner)
    await _clean_tokens(records.store, now)
    await _clean_archives(records.store, settings, now)
    await _clean_metrics(records.store, settings, now)
    if isinstance(engine, SupportsPrune):
        try:
            await engine.prune(now - settings.keep_logs_s, settings.max_kept_bytes)
            await _clean_checkpoints(records.store, settings, engine, now)
        except EngineUnreachable as error:
            log.warning("engine.unreachable", engine=engine.name, error=error.message)


async def _in_batches(store: Store, remove: Callable[[Tx], int], most: int) -> None:
    """Remove until a batch is not full. Other writes come in between."""
    while await store.write(remove) == most:
        pass


async def _clean_tokens(store: Store, now: float) -> None:
    """Remove tokens that ended long ago. No living token was made with one of them, because it would have
    ended too.
    """
    if await store.read(lambda tx: has_ended_long_ago(tx.tokens.all(), now)):
        await _in_batches(store, lambda tx: forget_ended(tx, now, MAX_TOKENS_DROPPED), MAX_TOKENS_DROPPED)


async def _clean_archives(store: Store, settings: Settings, now: float) -> None:
    """Remove archives that no open job or service uses and no request named for a week, and uploads that
    never ended.
    """
    folder = settings.state_dir / "archives"
    old = await anyio.to_thread.run_sync(_old_archives, folder, now)
    # Usually there is no old archive, so the open jobs need not be read.
    used = await store.read(_archives_in_use) if old else frozenset()
    await anyio.to_thread.run_sync(_drop_archives, folder, old - used, now)


def _old_archives(folder: Path, now: float) -> set[str]:
    """Return digests of archives that are old enough. Also remove old parts of uploads."""
    if not folder.is_dir():
        return set()
    for part in folder.glob(".part-*"):
        if _is_older(part, now - KEEP_PARTS_S):
            part.unlink(missing_ok=True)
    files = (path for path in folder.iterdir() if _ARCHIVE.fullmatch(path.name))
    return {path.stem for path in files if _is_older(path, now - KEEP_ARCHIVES_S)}


def _drop_archives(folder: Path, digests: Collection[str], now: float) -> None:
    """Remove the archives if they are still old. The right to use an archive goes first: a submission renews
    the date of an archive and then checks its right.

    So either the submission sees that the right is gone and sends the archive again, or this function sees
    the new date and leaves the file.
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
        yield from (release.archive_digest for release in releases if release.archive_digest is not None)
    before = None
    while page := tx.jobs.page(JobFilter(statuses=OPEN_STATUSES), before, PAGE):
        yield from (job.archive_digest for job, _ in page if job.archive_digest is not None)
        last = page[-1][0]
        before = (last.submitted_at, last.job_id)


async def _clean_metrics(store: Store, settings: Settings, now: float) -> None:
    """Remove metrics of jobs that ended long ago, together with their logs."""
    before = now - settings.keep_logs_s
    for job_id in await store.read(lambda tx: tx.metrics.silent(before, PAGE)):
        job = await store.read(partial(_job, job_id))
        if job is None or (job.ended_at is not None and job.ended_at < before):
            await _drop_metrics(store, job_id)
    await _bound_metrics(store)


async def _bound_metrics(store: Store) -> None:
    """If all metrics together are too many, remove those of ended jobs, the oldest first. Metrics of open
    jobs stay, because each job has its own limit. So the total may exceed the limit by the rows of open jobs.
    """
    excess = await store.read(lambda tx: tx.metrics.num_rows()) - MAX_METRIC_ROWS
    num_kept = 0
    while excess > 0 and (page := await store.read(partial(_oldest_metrics, num_kept))):
        for job_id, num_rows in page:
            job = await store.read(partial(_job, job_id))
            if job is not None and job.ended_at is None:
                num_kept += 1
                continue
            await _drop_metrics(store, job_id)
            log.info("metrics.dropped", job_id=job_id, rows=num_rows)
            excess -= num_rows
            if excess <= 0:
                return


def _oldest_metrics(skip: int, tx: Tx) -> list[tuple[str, int]]:
    return tx.metrics.oldest(skip, PAGE)


async def _drop_metrics(store: Store, job_id: str) -> None:
    """Remove the metrics of one job in batches, because it may have half a million points."""
    while not await store.write(lambda tx: tx.metrics.drop(job_id, MAX_POINTS_DROPPED)):
        pass


async def _clean_checkpoints(store: Store, settings: Settings, engine: SupportsPrune, now: float) -> None:
    """Remove checkpoints of jobs that ended long ago and that no service serves. A directory that belongs to
    no job is not ours to remove.
    """
    before = now - settings.keep_logs_s
    restored_at = await _restored_at(store, settings)
    for job_id in await engine.checkpoints():
        job = await store.read(partial(_job, job_id))
        if job is None or job.ended_at is None or job.ended_at >= before:
            continue
        if job.submitted_at < restored_at:
            continue  # the home that this one was copied from has the same job, and may need them
        if job_id not in await store.read(lambda tx: frozenset(served_jobs(tx))):
            try:
                await engine.drop_checkpoint(job_id)
            except EngineUnreachable as error:  # the others may go all the same
                log.warning("clean.checkpoint_stays", job=job_id, error=error.message)


async def _restored_at(store: Store, settings: Settings) -> float:
    """Return when a copied home began to share the cluster's checkpoint directory with its original; 0:
    never.
    """
    if settings.engine == "local":
        return 0.0  # its checkpoints are in the home, and were copied with it
    restored_at = await store.read(lambda tx: tx.meta.get(RESTORED_AT))
    return float(restored_at or 0.0)


def _job(job_id: str, tx: Tx) -> Job | None:
    return tx.jobs.get(job_id)
