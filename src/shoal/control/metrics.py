"""What nodes measure: checked, kept as far as the store takes it, and never a reason to doubt a lease."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import structlog

from shoal.control.batches import batched
from shoal.control.core import NEWS_PATIENCE_S, Core
from shoal.curve import MAX_X
from shoal.errors import StoreUnavailable
from shoal.model.attempt import Attempt
from shoal.samples import Samples
from shoal.store import Tx

MAX_NAME = 100
MAX_TOLD_SERIES, MAX_TOLD_POINTS = 256, 4096
"""Of one message; a supervisor sends less."""

MAX_AT_ONCE = 32
"""Series in one transaction, each with up to 512 rows to be written anew."""

log = structlog.get_logger()


async def keep(core: Core, attempt: Attempt, node: str, told: Iterable[Samples]) -> None:
    """Remember what makes sense. A store that cannot is no reason to refuse the sign of life."""
    kept = sensible(told)
    if not kept:
        return
    now, lost = core.clock.now(), 0
    try:
        for some in batched(kept, MAX_AT_ONCE):
            add = partial(_add, attempt, node, some, now)
            lost += await core.store.write(add, patience_s=NEWS_PATIENCE_S)
    except StoreUnavailable as error:
        log.warning("metrics.lost", attempt_id=attempt.attempt_id, node=node, error=error.message)
        return
    if lost:
        log.warning("metrics.too_many_series", job_id=attempt.job_id, node=node, points=lost)


def _add(attempt: Attempt, node: str, some: Iterable[Samples], now: float, tx: Tx) -> int:
    return tx.metrics.add(attempt.job_id, attempt.epoch, node, some, now)


def sensible(told: Iterable[Samples]) -> list[Samples]:
    """Those that a table can show and a number can hold."""
    kept: list[Samples] = []
    left = MAX_TOLD_POINTS
    for one in told:
        has_name = 0 < len(one.name) <= MAX_NAME and one.name.isprintable()
        is_rank = one.rank is None or 0 <= one.rank < MAX_X
        points = one.points if one.newest is None else (*one.points, one.newest)
        if not (has_name and is_rank and all(0 <= point.x <= MAX_X for point in points)):
            continue
        left -= len(one.points)
        if left < 0 or len(kept) >= MAX_TOLD_SERIES:
            break
        kept.append(one)
    return kept
