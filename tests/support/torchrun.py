"""Training programs outside of Shoal, as their users run them, with nothing in their way."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 220.0
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed: pip install 'shoal[train]'"
)


def torchrun(script: Path, *arguments: str, **variables: str) -> str:
    """What two ranks print."""
    return run([*LAUNCHER, str(script), *arguments], script.parent, variables)


def run(arguments: list[str], folder: Path, variables: dict[str, str]) -> str:
    """What Python prints, started in this folder; it must succeed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**kept, "OMP_NUM_THREADS": "1", **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
