"""What `shoal connect` writes down about any cluster whose nodes are other machines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TypeVar

import msgspec

from shoal.errors import SpecError

T = TypeVar("T", bound="Connection")


class Connection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    python: str = sys.executable
    """The Python with Shoal in it, as the nodes see it."""
    python_path: str = ""
    """Its PYTHONPATH, where Shoal is not installed in it."""
    spool: str = ""
    """A directory on each node's own disk; empty: below its /tmp."""
    shared: str = ""
    """A directory that all nodes and this machine have: for checkpoints, and for what keepers say."""
    project: str = "default"
    """The one whose jobs run there."""
    has_shared_trust: bool = False
    """Jobs of all projects may run there, though each could read and stop the others'."""


def load(path: Path, kind: type[T], name: str) -> T:
    """`SpecError` where nobody connected a `name` in this home, or the file is broken."""
    hint = f"shoal connect {name.lower()}"
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise SpecError(f"no {name} is connected in {path.parent}", hint=hint) from None
    except msgspec.DecodeError as error:
        raise SpecError(f"{path} cannot be read: {error}", hint=hint) from error
