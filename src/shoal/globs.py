"""File patterns as `.gitignore` has them, without `!`: which files of a folder they name.

A pattern without a slash names files at any depth, one with a slash counts from the folder itself. One that
names a folder names all that is below it. Nothing here compiles a pattern: the server checks them as text.
"""

from __future__ import annotations

import re

MAX_PATTERN = 1024


def problem_of(pattern: str) -> str | None:
    """Why this is no pattern for files of a folder, as a clause with what to write; None if it is one."""
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
        expression_of(pattern)  # the text of it: to compile what a stranger wrote takes long
    except ValueError:
        return "has a `[` without its `]`, or ends with `\\`; write `\\[` for the character itself"
    return None


def expression_of(pattern: str) -> str:
    """The regular expression for whole names. `ValueError`: it is no pattern.

    The first place where the words after a `**` fit leaves the most for the rest, so the expression never
    tries another one (`(?>...)`). The same holds within a name for `*`. Without that, some patterns of 10
    stars take minutes for one name; with it, the time grows with the square of the name's length at most.
    """
    body = pattern.removeprefix("./").rstrip("/")
    words = body.split("/")
    if len(words) == 1 and not pattern.startswith("./"):
        words = ["**", *words]
    text, closing = "", ""
    for number, word in enumerate(words):
        is_last = number == len(words) - 1
        if word != "**":
            text += segment_of(word) + (r"\Z" if is_last else "/")
        elif is_last:
            text, closing = f"{text}{closing}.+", ""
        else:
            text, closing = f"{text}{closing}(?>(?:[^/]+/)*?", ")"
    return text + closing


def segment_of(word: str) -> str:
    """One name between slashes. `ValueError`: a bracket is not closed, or nothing follows a backslash."""
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
    """The set that begins there as an expression, and where its closing bracket is."""
    begins = at + 2 if word[at + 1 : at + 2] in ("!", "^") else at + 1
    ends = word.index("]", begins + 1)
    if any(low > high for low, high in re.findall("(.)-(.)", word[begins:ends])):
        raise ValueError(word)
    inner = re.sub(r"([\\\[\]^&~|])", r"\\\1", word[begins:ends])
    return ends, f"(?!/)[{'^' if begins == at + 2 else ''}{inner}]"
