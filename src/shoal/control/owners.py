"""Give what jobs left in a copied home to the users that their projects have in the copy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.model.people import Project

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
MAX_DEPTH = 64
"""Directories below each other. What lies deeper keeps its owner, so that no job of the copy can use it."""


def give_home(home: Path, moves: Sequence[tuple[Project, int]]) -> None:
    """Give checkpoints and caches that belong to the users of these projects to users with the new uids.

    May be repeated with the same moves. Does nothing without root, whose homes alone have files of several
    users. The home must be out of the reach of the former users, as a closed directory is.
    """
    if os.geteuid() != 0:
        return
    changes = {project.uid: uid for project, uid in moves}
    caches = home / "caches"
    for folder in (home / "checkpoints", caches):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # a link may lead to the original's
            top = os.open(folder, DIRECTORY)
            try:
                _give(top, changes)
            finally:
                os.close(top)
    for project, uid in moves:
        with contextlib.suppress(FileNotFoundError):
            (caches / f"{project.name}-{project.uid}").rename(caches / f"{project.name}-{uid}")


def _give(folder: int, changes: Mapping[int, int], depth: int = 0) -> None:
    """Change the owner and the group of everything in an open directory, links themselves included."""
    with os.scandir(folder) as entries:
        for entry in entries:
            facts = entry.stat(follow_symlinks=False)
            uid, gid = changes.get(facts.st_uid, -1), changes.get(facts.st_gid, -1)
            if (uid, gid) != (-1, -1):
                os.chown(entry.name, uid, gid, dir_fd=folder, follow_symlinks=False)
            if depth < MAX_DEPTH and entry.is_dir(follow_symlinks=False):
                inner = os.open(entry.name, DIRECTORY, dir_fd=folder)
                try:
                    _give(inner, changes, depth + 1)
                finally:
                    os.close(inner)
