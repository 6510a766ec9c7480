"""Shoal's part for a node: whole, small, the same every time, and enough for a keeper."""

from __future__ import annotations

import io
import os
import platform
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from shoal.cluster import node_part
from shoal.errors import EngineRefused

OWN = (f"{sys.version_info.major}.{sys.version_info.minor}", platform.machine())


def test_a_keeper_runs_from_the_archive_alone(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(node_part.pack(*OWN))) as tar:
        tar.extractall(tmp_path, filter="data")
    done = subprocess.run(
        [sys.executable, "-P", "-s", "-S", "-m", "shoal.runtime.keep"],
        env={"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (64, "usage: python -m shoal.runtime.keep NODE < SUMMONS\n")
    assert not (tmp_path / "shoal" / "cli").exists()


def test_everything_that_runs_on_a_node_finds_what_it_imports_in_the_archive(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(node_part.pack(*OWN))) as tar:
        tar.extractall(tmp_path, filter="data")
    files = [path.relative_to(tmp_path) for path in (tmp_path / "shoal" / "runtime").rglob("*.py")]
    # What is run is no module to import.
    names = sorted(".".join(f.with_suffix("").parts) for f in files if f.stem != "__main__")
    # Of others a node may have more or less: torch, NVML.
    asked = """import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert not error.name.startswith("shoal"), (name, error.name)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-s", "-S", "-c", asked, *names],
        env={"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_same_sources_are_the_same_bytes() -> None:
    first = node_part.pack(*OWN)
    node_part.pack.cache_clear()
    assert node_part.pack(*OWN) == first


def test_a_python_for_which_pip_has_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution found\n")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(EngineRefused, match=r"msgspec for Python 3.99 on riscv.*No matching distribution"):
        node_part.pack("3.99", "riscv")
