"""What is being done, while it takes long: redrawn on a terminal, elsewhere a plain line now and then."""

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
    """Say on standard error what is worked at, and for how long. Gives a function to say something else.

    A pipe hears nothing of work that is done within `PLAIN_EVERY_S`.
    """
    said = [text]

    def say(now: str) -> None:
        said[0] = now

    is_terminal, is_over = sys.stderr.isatty(), threading.Event()
    teller = threading.Thread(target=_tell, args=(said, is_terminal, is_over), daemon=True)
    teller.start()
    try:
        yield say
    finally:
        is_over.set()
        teller.join()
        if is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _tell(said: list[str], is_terminal: bool, is_over: threading.Event) -> None:
    begun = time.monotonic()
    if is_terminal:
        print(said[0], end="", file=sys.stderr, flush=True)
    while not is_over.wait(REDRAW_EVERY_S if is_terminal else PLAIN_EVERY_S):
        line = f"{said[0]}: {time.monotonic() - begun:.0f} s so far"
        shown = f"\r\x1b[K{line}" if is_terminal else f"{line}\n"
        print(shown, end="", file=sys.stderr, flush=True)
