"""How a home is connected to a cluster, and how supervisors there reach the control planes.

`shoal connect` writes a `ClusterConnection`; each engine's config module extends it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TypeVar

import msgspec

from shoal.errors import SpecError

T = TypeVar("T", bound="ClusterConnection")


class ClusterConnection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    python: str = sys.executable
    """The Python with Shoal installed, as the nodes see it."""
    python_path: str = ""
    """Its PYTHONPATH, if Shoal is not installed in it."""
    spool: str = ""
    """A directory on each node's own disk; empty: below its /tmp."""
    shared: str = ""
    """A directory that all nodes and this machine share: for checkpoints and the output of node agents."""
    project: str = "default"
    """The project whose jobs run there."""
    has_shared_trust: bool = False
    """Jobs of all projects may run there, though each could read and stop the others'."""


def load_connection(path: Path, kind: type[T], name: str) -> T:
    """Load the connection. `SpecError`: no `name` is connected in this home, or the file is broken."""
    hint = f"shoal connect {name.lower()}"
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise SpecError(f"no {name} is connected in {path.parent}", hint=hint) from None
    except msgspec.DecodeError as error:
        raise SpecError(f"{path} cannot be read: {error}", hint=hint) from error


class ControlPlaneAccess(msgspec.Struct, frozen=True, kw_only=True):
    """How supervisors on other machines reach and verify the control planes, and where they work."""

    urls: tuple[str, ...]
    ca: str
    spool: str = ""
    """On each node's own disk; empty: below its /tmp."""
    shared: str = ""
    """A directory that every node and the control plane share; empty: there is none."""
