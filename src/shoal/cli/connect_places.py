"""Paths that `shoal connect` is told and nodes use: whole ones, and a shared directory that is there.

Jobs begin in other directories, on other machines: a path that is relative to where somebody typed it would
be another one there, and a directory that nobody mounted would be made on each node's own disk.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import SpecError

if TYPE_CHECKING:
    from shoal.engines.slurm.door import Door


def places(python: str | None, python_path: str, spool: str, shared: str, *, ssh: str = "") -> dict[str, Any]:
    """For the config, as nodes have them. `ssh`: they are those of other machines."""
    return {
        "python": whole_python(python or sys.executable, ssh=ssh),
        "python_path": ":".join(whole("--python-path", one, ssh=ssh) for one in python_path.split(":")),
        "spool": whole("--spool", spool, ssh=ssh),
        "shared": whole("--shared", shared, ssh=ssh),
    }


def whole(option: str, path: str, *, ssh: str = "") -> str:
    """The path as nodes have it. `ssh`: it is one of other machines, and where we are says nothing of it."""
    if not path or path.startswith("/"):
        return path
    if ssh:
        raise SpecError(
            f"`{option} {path}` is relative, and {ssh} is another machine",
            hint=f"name it as the nodes have it, an absolute path: `{option} /DIR`",
        )
    return str(Path(path).expanduser().absolute())


def whole_python(python: str, *, ssh: str = "") -> str:
    """A bare name is looked for on each node, in its PATH."""
    return whole("--python", python, ssh=ssh) if "/" in python else python


def refuse_missing(shared: str) -> None:
    """`SpecError` where this machine, which is one of the nodes or has what they have, does not have it."""
    if shared and not os.path.isdir(shared):  # noqa: PTH112 - what may not be looked at is not there, either
        raise _missing(shared)


def refuse_missing_at(door: Door, shared: str, *, ssh: str, rest: str) -> str:
    """The same, where Slurm is asked; by REST that may be another machine than this one, and is remarked."""
    if not shared or door.has_folder(shared):
        return ""
    if not rest:
        raise _missing(shared, f" on {ssh}" if ssh else "")
    return f"there is no directory {shared} on this machine; it must be on every node, and here"


def _missing(shared: str, where: str = "") -> SpecError:
    return SpecError(
        f"there is no directory {shared}{where}; make or mount it on every machine",
        hint=f"`ls -ld {shared}` there, or name another: `--shared DIR`",
    )
