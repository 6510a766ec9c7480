"""Which files of a folder some file patterns name (`shoal.globs` says what a pattern is).

Patterns are compiled here, in the process of the person who wrote them, and never in the server.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shoal.globs import expression_of, segment_of


class Globs:
    """Some patterns, which remember whether they named anything. `ValueError`: one of them is none."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = tuple(patterns)
        self._compiled = [
            (re.compile(expression_of(pattern), re.DOTALL), pattern.endswith("/")) for pattern in patterns
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

    def skip(self, folder: str) -> None:
        """Call no pattern unused that could name something in this folder, which is not looked into."""
        parts = folder.rstrip("/").split("/")
        self._used |= {number for number, pattern in enumerate(self.patterns) if _can_lead_to(pattern, parts)}

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
        if re.fullmatch(segment_of(word), folder) is None:
            return False
    return True
