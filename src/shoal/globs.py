"""Match the files of a folder with patterns as in `.gitignore`, but without `!`.

A pattern without a slash matches at any depth. A pattern with a slash counts from the folder itself. A
pattern that matches a folder matches everything below it. This module compiles no pattern: the server checks
patterns as text.
"""

from __future__ import annotations

import re

MAX_PATTERN = 1024


def problem_of(pattern: str) -> str | None:
    """Return a clause that says what is wrong with the pattern and what to write, or None."""
    if not pattern.strip():
        return "is empty; write a file or a folder of the workdir, such as `data/`"
    if len(pattern) > MAX_PATTERN:
        return f"is {len(pattern):,} characters long; at most {MAX_PATTERN:,}"
    if pattern.startswith(("/", "~")):
        return "is not below the workdir; write the path from the workdir on, such as `data/train.bin`"
    if ".." in pattern.split("/"):
        return "has `..` in it; only files of the workdir can be copied: choose another `workdir`"
    if pattern.startswith("!"):
        return "begins with `!`; write it without, in `include` or in `exclude`"
    try:
        expression_of(pattern)  # text only: compiling a stranger's pattern can take long
    except ValueError:
        return "has a `[` without its `]`, or ends with `\\`; write `\\[` for the character itself"
    return None


def expression_of(pattern: str) -> str:
    """Return the regular expression that matches whole names. `ValueError`: the pattern is not valid.

    The first place where the parts after a `**` match leaves the most for the rest, so the expression never
    tries another place (`(?>...)`). The same holds for `*` within a name. Without atomic groups, some
    patterns of 10 stars take minutes for one name. With them, the time grows at most with the square of the
    name's length.
    """
    body = pattern.removeprefix("./").rstrip("/")
    parts = body.split("/")
    if len(parts) == 1 and not pattern.startswith("./"):
        parts = ["**", *parts]
    text, closing = "", ""
    for number, word in enumerate(parts):
        is_last = number == len(parts) - 1
        if word != "**":
            text += segment_of(word) + (r"\Z" if is_last else "/")
        elif is_last:
            text, closing = f"{text}{closing}.+", ""
        else:
            text, closing = f"{text}{closing}(?>(?:[^/]+/)*?", ")"
    return text + closing


def segment_of(word: str) -> str:
    """Translate one name between slashes. `ValueError`: an open bracket, or a backslash at the end."""
    text, closing, at = "", "", 0
    while at < len(word):
        char = word[at]
        if char == "*":
            if not text.endswith("[^/]*?"):
                text, closing = f"{text}{closing}(?>[^/]*?", ")"
        elif char == "?":
            text += "[^/]"
        elif char == "[":
            at, inner = _bracket(word, at)
            text += inner
        elif char == "\\":
            at += 1
            if at == len(word):
                raise ValueError(word)
            text += re.escape(word[at])
        else:
            text += re.escape(char)
        at += 1
    return f"{text}(?![^/]){closing}"


def _bracket(word: str, at: int) -> tuple[int, str]:
    """Return the position of the closing bracket, and the character set as an expression."""
    begins = at + 2 if word[at + 1 : at + 2] in ("!", "^") else at + 1
    ends = word.index("]", begins + 1)
    if any(low > high for low, high in re.findall("(.)-(.)", word[begins:ends])):
        raise ValueError(word)
    inner = re.sub(r"([\\\[\]^&~|])", r"\\\1", word[begins:ends])
    return ends, f"(?!/)[{'^' if begins == at + 2 else ''}{inner}]"
