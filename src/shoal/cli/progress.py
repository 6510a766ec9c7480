"""Show what a long operation is doing: redrawn on a terminal, elsewhere a plain line every 5 s."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PLAIN_EVERY_S = 5.0
REDRAW_EVERY_S = 1.0


@contextmanager
def long_work(text: str) -> Iterator[Callable[[str], None]]:
    """Print on standard error what is in progress and for how long. Yields a function that changes the text.

    In a pipe, work that ends within `PLAIN_EVERY_S` prints nothing.
    """
    current = [text]

    def say(now: str) -> None:
        current[0] = now

    is_terminal, is_over = sys.stderr.isatty(), threading.Event()
    teller = threading.Thread(target=_show, args=(current, is_terminal, is_over), daemon=True)
    teller.start()
    try:
        yield say
    finally:
        is_over.set()
        teller.join()
        if is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _show(current: list[str], is_terminal: bool, is_over: threading.Event) -> None:
    begun = time.monotonic()
    if is_terminal:
        print(current[0], end="", file=sys.stderr, flush=True)
    while not is_over.wait(REDRAW_EVERY_S if is_terminal else PLAIN_EVERY_S):
        line = f"{current[0]}: {time.monotonic() - begun:.0f} s so far"
        shown = f"\r\x1b[K{line}" if is_terminal else f"{line}\n"
        print(shown, end="", file=sys.stderr, flush=True)
