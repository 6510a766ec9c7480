"""The files that Slurm writes for its jobs on the directory that all nodes share: which may go. Pure.

One for each Slurm job; in it is what a keeper said that could not say it to us, and mostly nothing. Its name
is of attempt and incarnation alone: Slurm replaces `%` and a letter in such a name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

OUTPUT = re.compile(r"(?:[^/.\x00][^/\x00]*/)?shoal-(?P<attempt_id>[^/\x00]+)\.[0-9]+\.out")
LIST = """\
[ ! -L "$1" ] && cd -P -- "$1" 2>/dev/null && [ -O . ] || exit 0
find . -mindepth "$2" -maxdepth "$2" -type f -name 'shoal-*.out' -printf '%s %P\\0' 2>/dev/null
exit 0
"""
"""For `sh -c`, with their folder and how deep they lie in it: tells of each the bytes in it, and its path.

Root looks through owners' folders. `find` passes links over, and nobody but root can put another thing in the
place of a folder in one that is root's (`accounts.GIVE`); of one that is not ours nothing is told.
A folder that an owner keeps from being read is his loss alone.
"""
DROP = """\
[ ! -L "$1" ] && cd -P -- "$1" 2>/dev/null && [ -O . ] || exit 0
exec xargs -0 -r rm -f --
"""
"""For `sh -c`, with their folder, and paths that were told on standard input: removes these."""


def output_name(attempt_id: str, incarnation: int) -> str:
    return f"shoal-{attempt_id}.{incarnation}.out"


def parse_outputs(told: str) -> dict[str, int]:
    """What `LIST` told: bytes, by path. A path may hold anything but a NUL."""
    found = (one.partition(" ")[::2] for one in told.split("\0") if one)
    return {path: int(size) for size, path in found}


def unneeded(sizes: Mapping[str, int], kept: Collection[str], old: Collection[str]) -> list[str]:
    """The paths of those that nobody reads: empty ones of attempts that were forgotten, and all of the old.

    What runs is neither, and what is another home's, who may have the same directory, is not known here.
    """
    named = ((path, size, OUTPUT.fullmatch(path)) for path, size in sizes.items())
    own = ((path, size, match["attempt_id"]) for path, size, match in named if match is not None)
    gone = frozenset(old)
    return sorted(path for path, size, one in own if one in gone or (size == 0 and one in kept))
