"""Waiting for jobs that were asked to stop, and saying for whom: a silent one may take its whole fence."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from shoal.cli.show import note
from shoal.cli.text import duration, one_line, utc
from shoal.client.handles import JobHandle, NotEnded
from shoal.errors import LimitReached, ShoalError

FIRST_WORD_S, NEXT_WORD_S = 2.0, 10.0
SHOWN = 3


def wait_for_ends(handles: Sequence[JobHandle]) -> list[str]:
    """Block until all of them have ended; how people name them. Says after a while who has not."""
    due = time.monotonic() + FIRST_WORD_S
    for number, handle in enumerate(handles):
        while True:
            try:
                handle.wait(max(due - time.monotonic(), 0.0))
                break
            except NotEnded:
                _tell(handles[number:])
                due = time.monotonic() + NEXT_WORD_S
            except LimitReached as busy:  # the server's: no reason to leave those who wait behind it
                note(f"-- {one_line(busy.message)}; asked again in {duration(NEXT_WORD_S)}")
                time.sleep(NEXT_WORD_S)
    return [handle.ref for handle in handles]


def _tell(left: Sequence[JobHandle]) -> None:
    """About the first few: each costs two questions."""
    for handle in left[:SHOWN]:
        told: dict[str, Any] = {}
        with suppress(ShoalError):
            if handle.refresh().is_ended:
                continue
            told = handle.why().get("explanation") or {}
        note(f"-- {waiting(handle, told, time.time())}; Ctrl-C leaves it stopping")
    if len(left) > SHOWN:
        note(f"-- and for {len(left) - SHOWN} more, where they have not ended yet")


def waiting(handle: JobHandle, told: dict[str, Any], now: float) -> str:
    """For whom, and what is known of when that ends. `told`: why it is where it is."""
    nodes = ", ".join(one_line(name) for name in handle.data.get("nodes") or ())
    who = f"waiting for {one_line(handle.ref)}{f' on {nodes}' if nodes else ''}"
    facts = told.get("facts") or {}
    if told.get("why") == "unreachable" and facts.get("fence_left_s", 0.0) > 0.0:
        ends = utc(now + facts["fence_left_s"], "%H:%M")
        silence = f"silent for {duration(facts['silent_s'])}"
        return f"{who} ({silence}; without word it counts as ended at about {ends} UTC)"
    return f"{who} ({one_line(told.get('sentence') or handle.status)})"
