"""Entry point of a node agent: `python -m shoal.runtime.agent.bootstrap NODE`, with a `LaunchRequest` on
standard input. Never imported.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # msgspec imports typing_extensions where it is installed, for types that nothing here uses. Without it
    # a start takes a sixth less time.
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]
    from shoal.runtime.agent.node_agent import main

    sys.exit(main(sys.argv[1:]))
