"""Ray Train, in an environment of its own under .cache/, with torch, which the other Ray
environment lacks.
"""

from __future__ import annotations

import shutil
import sys

from benchmarks.peers.ray import CONSTRAINTS, ROOT
from benchmarks.processes import call

HOME = ROOT / ".cache" / "ray-train"
PYTHON = HOME / "bin" / "python"
PINS = ROOT / "constraints.txt"


def why_not() -> str | None:
    """Return what to do if it is not installed; None: it is."""
    is_there = (HOME / "installed").is_file()
    return None if is_there else "Ray Train is not installed: `scripts/setup bench-engines`"


def install() -> None:
    """Create the environment once; a second call returns at once. Uses the torch version that Shoal is tested
    with.
    """
    [torch] = [line for line in PINS.read_text().splitlines() if line.startswith("torch==")]
    stamp, wanted = HOME / "installed", f"{CONSTRAINTS.read_text()}{torch}{sys.version}{HOME}"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    print("installing Ray Train into .cache/ray-train (a few minutes, 1.5 GB)", flush=True)
    shutil.rmtree(HOME, ignore_errors=True)
    call([sys.executable, "-m", "venv", HOME], timeout_s=120)
    pip = ["-m", "pip", "install", "--quiet", "-c", str(CONSTRAINTS)]
    call([PYTHON, *pip, "ray[default,train]", torch], timeout_s=1800)
    stamp.write_text(wanted)
