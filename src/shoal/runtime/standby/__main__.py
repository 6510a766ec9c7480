"""The entry point `python -m shoal.runtime.standby DIRECTORY`, which a supervisor runs. Never imported."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # msgspec imports typing_extensions if it is installed, for types that this process does not use.
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]
    from shoal.runtime.standby.process import main

    sys.exit(main(sys.argv[1:]))
