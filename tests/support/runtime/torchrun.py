"""Training programs outside of Shoal, as their users run them, with nothing in their way."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.style.tree import ROOT

LIMIT_S = 220.0
CACHE = ROOT / ".cache" / "torchrun"
RUNTIME = ROOT / "src" / "shoal" / "runtime"
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed: pip install 'shoal[train]'"
)


def torchrun(script: Path, *arguments: str, **variables: str) -> str:
    """What two ranks print."""
    return run([*LAUNCHER, str(script), *arguments], script.parent, variables)


def run_undisturbed(script: Path, folder: Path, **variables: str) -> str:
    """The same of a program that depends on nothing but its folder, Shoal's runtime and these variables, and
    saves in another folder. One run serves all lanes of `make test`, which may ask at the same time.
    """
    told = [version("torch"), script.name, *(f"{name}={value}" for name, value in sorted(variables.items()))]
    digest = hashlib.sha256("\0".join(told).encode())
    for source in sorted([*script.parent.glob("*.py"), *RUNTIME.rglob("*.py")]):
        digest.update(source.read_bytes())
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{digest.hexdigest()[:16]}.txt").open("a+") as kept:
        fcntl.flock(kept, fcntl.LOCK_EX)
        kept.seek(0)
        said = kept.read()
        if not said:
            said = torchrun(script, SHOAL_CHECKPOINT_DIR=str(folder), **variables)
            kept.write(said)
        return said


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
