"""Printing: tables that fit the screen, JSON for machines, errors with a hint of what to type.

The output is plain text unless standard output is a terminal and `NO_COLOR` is unset. It is never wider than
the terminal.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shoal.cli.arguments import with_flags
from shoal.cli.text import hanging_indent, hard_wrapped, one_line, shorten, width
from shoal.errors import ShoalError, SpecError

COLOURS = {
    "succeeded": "32", "running": "32", "ready": "32", "ok": "32",
    "starting": "33", "stopping": "33", "draining": "33", "drained": "33", "cordoned": "33", "warn": "33",
    "failed": "31", "dead": "31", "broken": "31",
    "cancelled": "2",
}  # fmt: skip

UNBOUNDED = 1 << 20
SLOW_S = 2.0
REDRAW_S = 0.2


def screen_columns() -> int:
    """Return `COLUMNS`, else the terminal's width, else 80; at least 40."""
    import shutil  # only tables and events need it

    return max(40, shutil.get_terminal_size((80, 24)).columns)


def is_bounded() -> bool:
    """Whether a table must fit a width. In a pipe without `COLUMNS` nothing is cut."""
    return sys.stdout.isatty() or bool(os.environ.get("COLUMNS"))


def fitted(line: str) -> str:
    """Return the line cut to the screen's width, if there is a screen."""
    return shorten(line, screen_columns()) if is_bounded() else line


def has_colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(word: str, padded: str) -> str:
    """Return `padded` in the colour of `word`, if colours are wanted."""
    code = COLOURS.get(word)
    return f"\x1b[{code}m{padded}\x1b[0m" if code and has_colour() else padded


def print_json(data: Any) -> None:
    """Print one JSON document in pure ASCII, so that nothing in it can control the terminal."""
    print(json.dumps(data, indent=2, ensure_ascii=True, allow_nan=False))


def print_json_line(data: Any) -> None:
    """Print one JSON document on one line and flush it, for streams."""
    print(json.dumps(data, ensure_ascii=True, allow_nan=False), flush=True)


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    elastic: str,
    wraps: bool = False,
    spare: Sequence[str] = (),
) -> str:
    """Return the rows under `heads`, fitted to the screen.

    If the table is too wide, it leaves out `spare` columns, in their order. If it is still too wide, it cuts
    the `elastic` column; with `wraps`, which needs `elastic` to be the last column, it wraps it instead.
    """
    cells = [[one_line(cell) for cell in row] for row in rows]
    widths = [max([width(head), *(width(row[i]) for row in cells)]) for i, head in enumerate(heads)]
    columns = screen_columns() if is_bounded() else UNBOUNDED
    over = sum(widths) + 2 * (len(widths) - 1) - columns
    if over > 0 and spare:
        kept = [i for i, head in enumerate(heads) if head != spare[0]]
        fewer = [[row[i] for i in kept] for row in cells]
        return table([heads[i] for i in kept], fewer, elastic=elastic, wraps=wraps, spare=spare[1:])
    bend = list(heads).index(elastic)
    if over > 0:
        widths[bend] = max(len(elastic), widths[bend] - over)
    if wraps:
        cells = [line for row in cells for line in _below(row, widths[-1])]
    lines = ["  ".join(head.ljust(widths[i]) for i, head in enumerate(heads)).rstrip()]
    for row in cells:
        padded = []
        for i, cell in enumerate(row):
            short = shorten(cell, widths[i])
            filled = short + " " * (widths[i] - width(short)) if i < len(row) - 1 else short
            padded.append(paint(cell, filled))
        lines.append("  ".join(padded).rstrip())
    return "\n".join(shorten(line, columns) if "\x1b" not in line else line for line in lines)


def _below(row: list[str], columns: int) -> Iterator[list[str]]:
    """Yield the row, then one more row for each further line of its wrapped last cell."""
    *others, last = row
    first, *more = hard_wrapped(last, columns)
    yield [*others, first]
    yield from ([*("" for _ in others), line] for line in more)


def print_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    elastic: str,
    wraps: bool = False,
    spare: Sequence[str] = (),
) -> None:
    print(table(heads, rows, elastic=elastic, wraps=wraps, spare=spare))


def note(text: str) -> None:
    """Print a note for a person on standard error, beside the data. On a terminal, wrap it at words.

    Flush standard output first, so that the order holds where both streams end up in one pipe.
    """
    sys.stdout.flush()
    if sys.stderr.isatty():
        text = "\n".join(folded(line) for line in text.split("\n"))
    print(text, file=sys.stderr, flush=True)


def print_folded(line: str) -> None:
    """Print to standard output; on a terminal, wrap at words."""
    print(folded(line) if sys.stdout.isatty() else line)


def folded(line: str) -> str:
    """Return one line of ours wrapped to the screen. A program's own lines, indented by 5, stay whole."""
    return line if line.startswith("     ") else "\n".join(hanging_indent(line, screen_columns()))


@contextmanager
def at_work(text: str) -> Iterator[None]:
    """Show on a terminal, during the block, what the command waits for. Elsewhere print nothing."""
    if not sys.stderr.isatty():
        yield
        return
    print(text, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def slow_work() -> Iterator[Callable[[str], None]]:
    """Yield a function that reports progress: shown on a terminal once the work has taken `SLOW_S`."""
    begun = time.monotonic()
    shown = [0.0]

    def show(text: str) -> None:
        now = time.monotonic()
        if now - begun > SLOW_S and now - shown[0] > REDRAW_S and sys.stderr.isatty():
            shown[0] = now
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if shown[0]:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def print_error(error: ShoalError, typed: Sequence[str] = ()) -> None:
    """Print `error:` for every problem, then one `hint:`. Name fields of the API by the typed flags."""
    problems = error.problems if isinstance(error, SpecError) else (error.message,)
    for problem in problems:
        note(f"error: {one_line(with_flags(problem, typed))}")
    if error.hint:
        note(f"hint: {one_line(error.hint)}")
    request_id = error.facts.get("request_id")
    if error.status >= 500 and request_id:
        note(f"      (request {one_line(request_id)}; see logs/control.log on the server)")
