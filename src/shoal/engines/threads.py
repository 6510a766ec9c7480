"""Work that blocks, beside the loop: what a disk refuses is an engine that cannot be asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

from shoal.errors import EngineUnreachable

T = TypeVar("T")


async def on_thread(work: Callable[[], T], failed: str, limiter: anyio.CapacityLimiter | None = None) -> T:
    """`EngineUnreachable`, which begins with `failed`, for an `OSError` of the work."""
    try:
        return await anyio.to_thread.run_sync(work, limiter=limiter)
    except OSError as error:
        raise EngineUnreachable(
            f"{failed}: {error.strerror or error}", hint="shoal doctor", errno=error.errno
        ) from error
