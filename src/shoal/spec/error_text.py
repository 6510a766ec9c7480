"""Values and names in error texts: short, printable, with the nearest valid name.

Values come from strangers. Nothing shown here can move a cursor, fill a screen or take long to print.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence

MAX_SHOWN = 48
"""Characters of a value that appear in a message."""


def escape(text: str) -> str:
    """Return the text with every character that a terminal would act on escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def show(value: object) -> str:
    """Return the value between backquotes, cut to `MAX_SHOWN` characters and safe to print anywhere."""
    if isinstance(value, str):
        return f"`{_cut(value)}`"
    if value is None or isinstance(value, bool):
        return f"`{str(value).lower().replace('none', 'null')}`"
    if isinstance(value, int):
        return f"`{value}`" if value.bit_length() <= 128 else f"a number of {_digits(value)} digits"
    if isinstance(value, float):
        return f"`{value:.0f}`" if value.is_integer() and abs(value) < 1e15 else f"`{value:g}`"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple | set | frozenset):
        return "a list"
    return f"a Python {_cut(type(value).__name__)}"


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that a person who typed `word` most likely meant, or None if none is close."""
    close = difflib.get_close_matches(
        word[:MAX_SHOWN].lower().replace("-", "_"), list(choices), n=1, cutoff=0.6
    )
    return close[0] if close else None


def or_nearest(word: str, choices: Iterable[str]) -> str:
    """Return the end of a sentence about a wrong `word`: a suggestion, or nothing."""
    meant = nearest(word, choices)
    return f"; did you mean `{meant}`?" if meant else ""


def either(choices: Sequence[str]) -> str:
    """Join the choices as `a`, `b` or `c`."""
    quoted = [f"`{choice}`" for choice in choices]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _cut(text: str) -> str:
    """Cut before and after escaping: an escape is up to ten characters long."""
    shown = escape(text[: MAX_SHOWN + 1])
    return shown if len(shown) <= MAX_SHOWN else shown[: MAX_SHOWN - 3] + "..."


def _digits(value: int) -> int:
    """About how many digits. Printing a number this large is what the caller avoids."""
    return int(value.bit_length() * math.log10(2)) + 1
