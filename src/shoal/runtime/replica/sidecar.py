"""Entry point of the sidecar: `python -m shoal.runtime.replica.sidecar`, with a `SidecarConfig` on stdin."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # msgspec imports typing_extensions where it is installed, for types that nothing here uses.
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]
    from shoal.runtime.replica.sidecar_process import main

    sys.exit(main())
