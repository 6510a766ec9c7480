"""Be a keeper: `python -m shoal.runtime.keep NODE`, with a `Summons` on standard input. Never imported."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # msgspec takes typing_extensions where it is installed, for types nothing here uses: a sixth of a start.
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]
    from shoal.runtime.keeper import main

    sys.exit(main(sys.argv[1:]))
