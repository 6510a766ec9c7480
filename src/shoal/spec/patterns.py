"""Whether a text looks like a regular expression, without compiling it.

The control plane compiles no pattern that a person sent: 60 KB of them would hold it up for seconds. The
job's supervisor compiles them, in CPU time of the job, and says what this one pass does not see.
"""

from __future__ import annotations

import re

from shoal.spec.wording import show

MAX_DEPTH = 100
MAX_REPEATS = 1_000_000_000
_REPEATS = re.compile(r"\{(\d{0,20})(?:,(\d{0,20}))?\}")
_HAS_COMMENTS = re.compile(r"\(\?(?:#|[a-zA-Z]*x)")
_REPEATERS = "*+?"
_NOTHING = ("(", "|", "^(", "")


def checked_pattern(pattern: str) -> str:
    """Return `pattern`. Raises `ValueError` with what is wrong with it."""
    wrong = _mistake(pattern) if not _HAS_COMMENTS.search(pattern) else None
    if wrong is not None:
        raise ValueError(f"{show(pattern)} is not a regular expression: {wrong}")
    return pattern


def _mistake(pattern: str) -> str | None:
    at, depth, before = 0, 0, ""
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            if at + 1 == len(pattern):
                return "a backslash at its end"
            at += 1
        elif char == "[":
            end = _class_end(pattern, at)
            if end is None:
                return f"`[` at {at} is not closed"
            at = end
        elif char == "(":
            depth += 1
            if depth > MAX_DEPTH:
                return f"it is nested too deeply, more than {MAX_DEPTH} times"
            if pattern[at + 1 : at + 2] == "?":
                at += 1  # an extension, and no repeat
        elif char == ")":
            depth -= 1
            if depth < 0:
                return f"`)` at {at} closes nothing"
        elif char in _REPEATERS and before in _NOTHING:
            return f"nothing to repeat before `{char}` at {at}"
        elif char == "{" and _repeats(pattern, at) > MAX_REPEATS:
            return f"more than {MAX_REPEATS} repeats at {at}"
        before = char
        at += 1
    return "`(` is not closed" if depth else None


def _repeats(pattern: str, at: int) -> int:
    """The largest count of the repeat that begins there; 0 where none does."""
    counts = _REPEATS.match(pattern, at)
    return max((int(count) for count in counts.groups() if count), default=0) if counts else 0


def _class_end(pattern: str, start: int) -> int | None:
    """Where the set of characters that begins at `start` ends. Its first character may be `]`."""
    at = start + 1
    if pattern[at : at + 1] == "^":
        at += 1
    if pattern[at : at + 1] == "]":
        at += 1
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "]":
            return at
        at += 1
    return None
