"""A place for what is half made, of one term: whoever leads takes away those of the terms before.

What is made there appears elsewhere by a rename. So one that was deposed and does not know it yet cannot make
anything appear, and a process that is frozen in the middle holds up nobody.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from shoal.errors import Deposed
from shoal.runtime import removal

TERM_DIGITS = 12
REMOVAL_S = 0.5


def begin_term(drafts: Path, trash: Path, term: int) -> Path:
    """Our own place below `drafts`; those of earlier terms are in the trash when this returns.

    `Deposed`: a later term has begun. Ours is there before we look for later ones, and theirs is before they
    look for earlier ones: of two that do so at once, the earlier one is always found.
    """
    own = drafts / f"{term:0{TERM_DIGITS}d}"
    _move(own, trash)  # of a process that had this term before us, where there are no terms
    own.mkdir(mode=0o700)
    for other in drafts.iterdir():
        if other.name > own.name and other.name.isdigit():
            _move(own, trash)
            raise Deposed(f"another control plane leads since term {term}: it began term {int(other.name)}")
        if other != own:
            _move(other, trash)
    return own


def throw_away(path: Path, trash: Path) -> None:
    """Gone at once, by one rename; what is left of it is removed now, or when the trash is swept."""
    removal.remove(str(_move(path, trash)), timeout_s=REMOVAL_S)


def _move(path: Path, trash: Path) -> Path:
    thrown = trash / f"{path.name}.{os.urandom(6).hex()}"
    with contextlib.suppress(FileNotFoundError):
        path.rename(thrown)
    return thrown
