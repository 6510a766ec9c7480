"""HTTP out: the Python SDK. `from shoal.client import Shoal`.

Imports only leaves and `spec`. It asks a control plane and never touches its files or its database.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.client.handles import ArrayHandle, JobHandle
    from shoal.client.sdk import Shoal

__all__ = ["ArrayHandle", "JobHandle", "Shoal"]

HOMES = {"ArrayHandle": "handles", "JobHandle": "handles", "Shoal": "sdk"}


def __getattr__(name: str) -> Any:
    """Resolved when first asked for: `shoal queue` uses this package without paying for `spec`."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
