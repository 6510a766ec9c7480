"""Memory of a node that ranks used is freed, and no other memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.runtime.files import checkpoint_storage, spool
from shoal.runtime.files.checkpoint_storage import memory_folder, remove_memory_folder
from shoal.wire import EndKind
from tests.support.runtime.tasks import StartTask, a_task_spec, tasks_in


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(checkpoint_storage, "MEMORY", str(tmp_path))
    return tmp_path


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartTask]:
    with tasks_in(tmp_path / "home") as make:
        yield make


def test_memory_of_this_attempt_on_this_node_is_removed_and_a_link_is_not_followed(memory: Path) -> None:
    task_spec = a_task_spec(attempt_id="att_1", node="n1", nodes=("n1",))
    mine = Path(memory_folder(os.getuid(), "att_1", "n1"))
    others = [Path(memory_folder(os.getuid(), job, node)) for job, node in (("att_2", "n1"), ("att_1", "n2"))]
    for folder in (mine, *others):
        (folder / "step").mkdir(parents=True)
        (folder / "step" / "shard").write_bytes(b"x")
    remove_memory_folder(task_spec.identity, task_spec.isolation.uid)
    remove_memory_folder(task_spec.identity, task_spec.isolation.uid)
    assert not mine.exists()
    assert all(other.exists() for other in others)
    mine.symlink_to(others[0])
    remove_memory_folder(task_spec.identity, task_spec.isolation.uid)
    assert not mine.is_symlink()
    assert (others[0] / "step" / "shard").exists()


def test_task_without_a_sandbox_leaves_nothing_in_memory(start: StartTask, tmp_path: Path) -> None:
    run = f"att_{os.getpid()}"
    task_spec = a_task_spec(attempt_id=run, confinement=())
    mine = Path(memory_folder(os.getuid(), run, task_spec.identity.node))
    task = start(task_spec)
    mine.mkdir(mode=0o700)
    (mine / "shard").write_bytes(b"x")
    assert task.run().kind is EndKind.SUCCEEDED
    assert not mine.exists()


def test_memory_of_a_killed_supervisors_task_is_removed_with_its_leftovers(
    memory: Path, tmp_path: Path
) -> None:
    task_spec = a_task_spec(attempt_id="att_1")
    task = spool.SpoolTask(tmp_path / "share")
    Path(task.directory).mkdir()
    spool.write_task_spec(task, task_spec)
    mine = Path(memory_folder(os.getuid(), "att_1", task_spec.identity.node))
    mine.mkdir()
    assert spool.kill_leftovers(task.directory)
    assert not mine.exists()
