"""Started as `python -m shoal.runtime.porch` by a supervisor, a `Brief` on standard input. Never imported."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # msgspec takes typing_extensions where it is installed, for types nothing here uses.
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]
    from shoal.runtime.porch.process import main

    sys.exit(main())
