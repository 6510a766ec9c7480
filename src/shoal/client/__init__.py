"""HTTP out: the Python SDK. `from shoal.client import Shoal`.

`sdk.py` (`Shoal`) reads specs and is a `Connection` (`connection.py`), which has a method for each request;
further requests are in `resources.py`. `credentials.py` finds the server's address and token. `transport.py`
sends requests with retries over `http1.py`, and `tls.py` adds TLS; `stream.py` follows event streams. A
submit goes through `submission.py`: `selection.py` and `left_behind.py` choose the files of the work
directory, `snapshot.py` packs them. The results are handles (`handles.py`).

The package imports only leaves and `spec`. It sends requests to a control plane and never touches its files
or its database.
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
    """Import a class when it is first used, so that `shoal queue` does not pay for `spec`."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
