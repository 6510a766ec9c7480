"""What a drill changes in a job's checkpoints, and what it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.runtime.files import checkpoint_storage
from shoal.runtime.process import tree
from shoal.runtime.supervisor.checkpoint_damage import NUM_BYTES, damage, flip_bytes


def a_checkpoint(place: Path, step: int) -> Path:
    folder = place / f"step-{step:012d}-1-0"
    folder.mkdir()
    (folder / "manifest.json").write_bytes(b"x" * 5000)
    (folder / "small").write_bytes(b"s" * 10)
    (folder / "large").write_bytes(b"l" * 1000)
    return folder


def test_only_the_largest_file_of_the_newest_checkpoint_is_changed(tmp_path: Path) -> None:
    old, new = a_checkpoint(tmp_path, 10), a_checkpoint(tmp_path, 20)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    damage(str(tmp_path), ("att_1", "n1"))
    changed = {path for path, data in before.items() if path.read_bytes() != data}
    assert changed == {new / "large"}
    assert old.exists()
    data = (new / "large").read_bytes()
    assert (len(data), data.count(b"l")) == (1000, 1000 - NUM_BYTES)


def test_damage_removes_copies_in_memory_that_ranks_would_read_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_storage, "MEMORY", str(tmp_path))
    directory = tmp_path / "directory"
    mine, other = (
        Path(checkpoint_storage.memory_folder(os.getuid(), "att_1", node)) for node in ("n1", "n2")
    )
    for place in (directory, mine, other):
        place.mkdir()
        for step in (10, 20, 30)[: 2 if place is directory else 3]:
            a_checkpoint(place, step)
    damage(str(directory), ("att_1", "n1"))
    assert [path.name[:17] for path in mine.iterdir()] == ["step-000000000010"]
    assert len(list(other.iterdir())) == 3
    assert len(list(directory.iterdir())) == 2


def test_small_file_is_changed_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "tiny"
    path.write_bytes(b"\x00\x01")
    assert flip_bytes(str(path)) == 2
    assert path.read_bytes() == b"\xff\xfe"


def test_only_checkpoint_is_not_damaged(tmp_path: Path) -> None:
    folder = a_checkpoint(tmp_path, 10)
    code = (
        "from shoal.runtime.supervisor.checkpoint_damage import damage; "
        f"damage({str(tmp_path)!r}, ('att_1', 'n1'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"holds only {folder.name}; with none before it, all work would be lost" in done.stderr
    assert (folder / "large").read_bytes() == b"l" * 1000


def test_process_is_assigned_to_a_rank_by_the_pipe_it_writes_to() -> None:
    with subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE) as writer:
        with subprocess.Popen(["sleep", "60"]) as other:
            assert writer.stdout is not None
            inode = os.fstat(writer.stdout.fileno()).st_ino
            assert tree.writing_to({writer.pid, other.pid, os.getpid()}, {inode}) == {writer.pid}
            other.kill()
        writer.kill()
