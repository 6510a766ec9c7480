"""A cluster of simulated nodes, used as a person uses it: through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.style.tree import ROOT

LIMIT_S = 110.0


class Cluster:
    """Two simulated nodes of two GPUs in a home of their own, used through the command line."""

    def __init__(self, home: Path) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
        path = f"{Path(sys.executable).parent}:{kept['PATH']}"
        self.env = {**kept, "SHOAL_HOME": str(home), "PATH": path}

    def __call__(self, *argv: str, code: int = 0) -> str:
        """What the command prints; it must end with this code."""
        done = subprocess.run(
            [sys.executable, "-m", "shoal.cli.main", *argv],
            env=self.env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def jobs(self, name: str) -> list[dict[str, Any]]:
        return list(json.loads(self("queue", "--all", "--name", name, "--json")))
