"""Run one node's share of one attempt from its order to its outcome, and outlive everybody else.

Started as `python -m shoal.runtime.supervisor DIRECTORY` with credentials on standard input. It depends
on nobody after that: not on the engine that started it, not on the control plane. Never imported.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # msgspec takes typing_extensions where it is installed, for types nothing here uses: 8 ms of every start.
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]
    from shoal.runtime.entry import main

    sys.exit(main(sys.argv[1:]))
