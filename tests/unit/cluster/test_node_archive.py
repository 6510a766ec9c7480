"""Shoal's node archive: whole, small, the same every time, and enough for a node agent."""

from __future__ import annotations

import io
import os
import platform
import subprocess
import sys
import tarfile
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.cluster import node_archive, shell
from shoal.errors import EngineRefused

OWN = (f"{sys.version_info.major}.{sys.version_info.minor}", platform.machine())


def test_node_agent_runs_from_the_archive_alone(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(node_archive.pack(*OWN))) as tar:
        tar.extractall(tmp_path, filter="data")
    done = subprocess.run(
        [sys.executable, "-P", "-s", "-S", "-m", "shoal.runtime.agent.bootstrap"],
        env={"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (
        64,
        "usage: python -m shoal.runtime.agent.bootstrap NODE < LAUNCH_REQUEST\n",
    )
    assert not (tmp_path / "shoal" / "cli").exists()


def test_everything_that_runs_on_a_node_finds_what_it_imports_in_the_archive(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(node_archive.pack(*OWN))) as tar:
        tar.extractall(tmp_path, filter="data")
    files = [path.relative_to(tmp_path) for path in (tmp_path / "shoal" / "runtime").rglob("*.py")]
    # What is run is no module to import.
    names = sorted(".".join(f.with_suffix("").parts) for f in files if f.stem != "__main__")
    # Only what ranks import comes from where their own Python has it: torch, obstore, Lightning.
    program = """import importlib, sys
of_ranks = ("rank", "accelerate", "lightning", "transformers")
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        is_ranks = name.startswith(tuple(f"shoal.runtime.{part}" for part in of_ranks))
        assert is_ranks and not error.name.startswith("shoal"), (name, error.name)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-s", "-S", "-c", program, *names],
        env={"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


@dataclass
class Node:
    """A machine's folders, on this machine."""

    folder: Path

    @property
    def link(self) -> Path:
        return self.folder / "shoal-node"

    @property
    def versions(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "shoal-node-versions").iterdir())

    def unpack(self, version: str) -> None:
        run = subprocess.run
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w:gz") as tar:
            for name in (
                "shoal/__init__.py",
                "shoal/runtime/__init__.py",
                "shoal/runtime/agent/node_agent.py",
            ):
                entry = tarfile.TarInfo(name)
                entry.size = len(version)
                tar.addfile(entry, io.BytesIO(version.encode()))
        has = ["sh", "-c", node_archive.is_archive_unpacked(version[1:])]
        assert run(has, check=False, stderr=subprocess.DEVNULL).returncode == 1
        run(["sh", "-c", node_archive.unpack_archive(version[1:])], input=archive.getvalue(), check=True)
        assert run(has, check=False).returncode == 0
        assert (self.link / "shoal" / "__init__.py").read_text() == version


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    (tmp_path / "state").mkdir()
    for module in (node_archive, shell):
        monkeypatch.setattr(module, "STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(node_archive, "NODE_DIR", str(tmp_path / "shoal-node"))
    monkeypatch.setattr(node_archive, "VERSIONS", str(tmp_path / "shoal-node-versions"))
    monkeypatch.setattr(node_archive, "PYTHON", sys.executable)
    return Node(tmp_path)


def test_running_job_keeps_the_version_it_began_with(node: Node) -> None:
    node.unpack("#v1")
    began = node.link.resolve()
    node.unpack("#v2")
    assert (began / "shoal" / "runtime" / "agent" / "node_agent.py").read_text() == "#v1"
    assert node.link.resolve().name == "v2"
    records = (node.folder / "state" / "made").read_text().splitlines()
    assert records == [f"folder {node.link}", f"folder {node.link}-versions"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to see what other users run")
def test_an_older_version_goes_once_nothing_runs_from_it(node: Node) -> None:
    node.unpack("#v1")
    environment = {"PYTHONPATH": str(node.link.resolve()), "PATH": os.environ["PATH"]}
    with subprocess.Popen(["sleep", "600"], env=environment) as job:
        try:
            node.unpack("#v2")
            node.unpack("#v3")
            assert node.versions == ["v1", "v2", "v3"]
        finally:
            job.kill()
    node.unpack("#v4")
    assert node.versions == ["v3", "v4"]


def test_a_folder_that_an_older_shoal_made_becomes_a_link(node: Node) -> None:
    (node.link / "shoal").mkdir(parents=True)
    (node.link / "shoal" / "__init__.py").write_text("#v0")
    (node.folder / "state" / "made").write_text(f"folder {node.link}\n")
    node.unpack("#v1")
    assert node.link.is_symlink()
    (before,) = (node.folder / "shoal-node-versions").glob("before-*")
    assert (before / "shoal" / "__init__.py").read_text() == "#v0"


def test_foreign_folder_is_left_alone(node: Node) -> None:
    node.link.mkdir()
    with pytest.raises(subprocess.CalledProcessError):
        node.unpack("#v1")
    assert sorted(path.name for path in node.folder.iterdir()) == ["shoal-node", "state"]


def test_there_is_a_whole_version_at_any_time(node: Node) -> None:
    node.unpack("#v1")
    is_over, seen = threading.Event(), set()

    def look() -> None:
        while not is_over.is_set():
            seen.add((node.link / "shoal" / "runtime" / "agent" / "node_agent.py").exists())

    watcher = threading.Thread(target=look)
    watcher.start()
    for version in ("#v2", "#v3"):
        node.unpack(version)
    is_over.set()
    watcher.join()
    assert seen == {True}


def test_the_same_sources_are_the_same_bytes() -> None:
    first = node_archive.pack(*OWN)
    node_archive.pack.cache_clear()
    assert node_archive.pack(*OWN) == first


def test_python_without_an_msgspec_wheel_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution found\n")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(EngineRefused, match=r"msgspec.* for Python 3.99 on riscv.*No matching distribution"):
        node_archive.pack("3.99", "riscv")
