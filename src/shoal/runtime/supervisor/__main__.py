"""Run the task of one attempt on one node, from its task spec to its outcome.

Started as `python -m shoal.runtime.supervisor DIRECTORY` with credentials on standard input. After that it
depends on no other process: not on the engine that started it, not on the control plane. Never imported.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # msgspec imports typing_extensions where it is installed, for types that nothing here uses: 8 ms a start.
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]
    from shoal.runtime.supervisor.entry import main

    sys.exit(main(sys.argv[1:]))
