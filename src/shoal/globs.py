"""File patterns as `.gitignore` has them, without `!`: which files of a folder they name.

A pattern without a slash names files at any depth, one with a slash counts from the folder itself. One that
names a folder names all that is below it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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
        _expression(pattern)  # the text of it: to compile what a stranger wrote takes long
    except ValueError:
        return "has a `[` without its `]`, or ends with `\\`; write `\\[` for the character itself"
    return None


class Globs:
    """Some patterns, which remember whether they named anything. `ValueError`: one of them is none."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = tuple(patterns)
        self._compiled = [
            (re.compile(_expression(pattern), re.DOTALL), pattern.endswith("/")) for pattern in patterns
        ]
        self._folders: dict[str, frozenset[int]] = {"": frozenset()}
        self._used: set[int] = set()

    @property
    def unused(self) -> list[str]:
        """Patterns that named nothing that was asked about."""
        return [pattern for number, pattern in enumerate(self.patterns) if number not in self._used]

    def names(self, name: str, *, is_folder: bool = False) -> bool:
        """Whether a pattern names this file, a path below the folder, or a folder that it is in."""
        found = self._of_folder(name) if is_folder else self._of(name, is_folder=False)
        self._used |= found
        return bool(found)

    def may_name_below(self, folder: str) -> bool:
        """Whether a pattern could name something in there: one that begins with other folders cannot."""
        parts = folder.split("/")
        return any(_can_lead_to(pattern, parts) for pattern in self.patterns)

    def _of_folder(self, folder: str) -> frozenset[int]:
        waiting = []
        while folder not in self._folders:
            waiting.append(folder)
            folder = folder.rpartition("/")[0]
        for folder in reversed(waiting):
            self._folders[folder] = self._of(folder, is_folder=True)
        return self._folders[folder]

    def _of(self, name: str, *, is_folder: bool) -> frozenset[int]:
        above = self._of_folder(name.rpartition("/")[0])
        own = (  # of all patterns, so that each is known to be of use
            number
            for number, (expression, is_of_folders) in enumerate(self._compiled)
            if (is_folder or not is_of_folders) and expression.fullmatch(name)
        )
        return above | frozenset(own)


def _can_lead_to(pattern: str, folders: Sequence[str]) -> bool:
    words = pattern.removeprefix("./").rstrip("/").split("/")
    if len(words) == 1:
        return True
    for word, folder in zip(words, folders, strict=False):
        if word == "**":
            return True
        if re.fullmatch(_segment(word), folder) is None:
            return False
    return True


def _expression(pattern: str) -> str:
    """The regular expression for whole names. `ValueError`: it is no pattern."""
    body = pattern.removeprefix("./").rstrip("/")
    words = body.split("/")
    if len(words) == 1 and not pattern.startswith("./"):
        words = ["**", *words]
    text = ""
    for number, word in enumerate(words):
        is_last = number == len(words) - 1
        if word == "**":
            text += ".+" if is_last else "(?:.+/)?"
        else:
            text += _segment(word) + ("" if is_last else "/")
    return text


def _segment(word: str) -> str:
    """One name between slashes. `ValueError`: a bracket is not closed, or nothing follows a backslash."""
    text, at = "", 0
    while at < len(word):
        char = word[at]
        if char == "*":
            text += "" if text.endswith("[^/]*") else "[^/]*"
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
    return text


def _bracket(word: str, at: int) -> tuple[int, str]:
    """The set that begins there as an expression, and where its closing bracket is."""
    begins = at + 2 if word[at + 1 : at + 2] in ("!", "^") else at + 1
    ends = word.index("]", begins + 1)
    if any(low > high for low, high in re.findall("(.)-(.)", word[begins:ends])):
        raise ValueError(word)
    inner = re.sub(r"([\\\[\]^&~|])", r"\\\1", word[begins:ends])
    return ends, f"(?!/)[{'^' if begins == at + 2 else ''}{inner}]"
