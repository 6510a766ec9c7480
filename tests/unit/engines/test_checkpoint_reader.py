"""What a job left in its checkpoint directory, looked at by somebody who trusts nothing there."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.engines import checkpoint_reader
from shoal.engines.base import SavedState
from shoal.engines.checkpoint_reader import inspect_checkpoints
from shoal.runtime.rank.checkpoint.manifest import (
    MANIFEST,
    STATUS,
    IntervalDecision,
    IntervalReason,
    record_save,
)

JOB = "job_0001"
DATA = b"weights" * 100
NESTED = b'{"other": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / JOB).mkdir()
    return tmp_path


def save(home: Path, step: int, *, epoch: int = 1, **changes: Any) -> Path:
    created = home / JOB / f"step-{step:012d}-{epoch}-0"
    created.mkdir()
    (created / "shard").write_bytes(DATA)
    record = {"num_bytes": len(DATA), "sha256": hashlib.sha256(DATA).hexdigest()}
    values = {
        "job_id": JOB,
        "step": step,
        "epoch": epoch,
        "rendezvous_round": 0,
        "world_size": 2,
        "run_s": 1.0,
    }
    result = {"version": 1, **values, "files": {"shard": record}, **changes}
    (created / MANIFEST).write_text(json.dumps(result))
    return created


def states(home: Path, *, verify: bool = False) -> dict[int, SavedState]:
    return {item.step: item.state for item in inspect_checkpoints(home, JOB, lambda: verify).items}


def test_checkpoints_are_listed_as_they_would_be_tried(home: Path) -> None:
    save(home, 30)
    save(home, 20, epoch=2)
    save(home, 10)
    result = inspect_checkpoints(home, JOB).items
    assert [(item.step, item.epoch) for item in result] == [(20, 2), (30, 1), (10, 1)]
    assert {(item.state, item.size_bytes, item.world_size) for item in result} == {
        (SavedState.COMPLETE, len(DATA), 2)
    }


def test_changed_byte_is_found_by_its_hash_and_missing_ones_without(home: Path) -> None:
    for step in (1, 2, 3):
        save(home, step)
    folder = home / JOB
    (folder / "step-000000000001-1-0" / "shard").write_bytes(DATA[:-1])
    (folder / "step-000000000002-1-0" / "shard").write_bytes(b"X" + DATA[1:])
    assert states(home) == {3: SavedState.COMPLETE, 2: SavedState.COMPLETE, 1: SavedState.DAMAGED}
    assert states(home, verify=True) == {
        3: SavedState.VERIFIED,
        2: SavedState.DAMAGED,
        1: SavedState.DAMAGED,
    }
    short, changed = (
        inspect_checkpoints(home, JOB, lambda: True).items[-1],
        inspect_checkpoints(home, JOB, lambda: True).items[1],
    )
    assert short.problem == f"shard has {len(DATA) - 1} bytes of {len(DATA)}"
    assert changed.problem == "shard is not what was written"


def test_what_was_never_committed_is_unfinished(home: Path) -> None:
    save(home, 5).rename(home / JOB / ".unfinished-step-000000000005-1-0")
    assert states(home) == {5: SavedState.UNFINISHED}


def test_job_without_a_directory_has_saved_nothing(home: Path) -> None:
    assert inspect_checkpoints(home, "job_0002").items == ()
    assert inspect_checkpoints(home, "../etc").items == ()


def test_links_pipes_and_garbage_are_damaged_and_harm_nobody(home: Path, tmp_path: Path) -> None:
    outside = tmp_path / "secret"
    outside.write_bytes(DATA)
    linked = save(home, 1)
    (linked / "shard").unlink()
    (linked / "shard").symlink_to(outside)
    piped = save(home, 2)
    (piped / "shard").unlink()
    os.mkfifo(piped / "shard")
    save(home, 3, files={"../../secret": {"num_bytes": len(DATA), "sha256": ""}})
    (save(home, 4) / MANIFEST).write_bytes(b"\xff{")
    save(home, 5, rendezvous_round=6)
    (home / JOB / "step-000000000007-1-0").symlink_to(tmp_path)
    (home / JOB / f"step-000000000008-1-{'9' * 200}").mkdir()
    (save(home, 9) / MANIFEST).write_bytes(NESTED)
    assert states(home, verify=True) == dict.fromkeys((9, 7, 5, 4, 3, 2, 1), SavedState.DAMAGED)


def test_places_and_pace_are_the_jobs_own_word(home: Path) -> None:
    decision = IntervalDecision(reason=IntervalReason.COST, steps=7, step_s=0.5, cost_s=0.1, mtbf_s=1e6)
    for step in (1, 2):
        record_save(str(home / JOB), save(home, step).name, ("memory", "directory"), decision)
    checkpoints = inspect_checkpoints(home, JOB)
    assert [item.locations for item in checkpoints.items] == [("memory", "directory"), ("directory",)]
    assert checkpoints.decision is not None
    assert msgspec.to_builtins(checkpoints.decision) == msgspec.to_builtins(decision)


@pytest.mark.parametrize("odd", [b"", b"[1]", b'{"kept": 3}', b"x" * (2 << 20), NESTED])
def test_status_that_is_none_is_passed_over(home: Path, odd: bytes) -> None:
    save(home, 1)
    (home / JOB / STATUS).write_bytes(odd)
    checkpoints = inspect_checkpoints(home, JOB)
    assert (checkpoints.decision, checkpoints.items[0].locations) == (None, ("directory",))


def test_checkpoint_beyond_the_budget_is_unchecked(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        save(home, step)
    monkeypatch.setattr(checkpoint_reader, "MAX_FILES", 2)
    assert states(home) == {3: SavedState.COMPLETE, 2: SavedState.COMPLETE, 1: SavedState.UNCHECKED}
    monkeypatch.setattr(checkpoint_reader, "MAX_FILES", 0)
    newest, *older = inspect_checkpoints(home, JOB).items
    assert (newest.state, newest.size_bytes, newest.world_size) == (SavedState.UNCHECKED, len(DATA), 2)
    assert {(item.state, item.world_size) for item in older} == {(SavedState.UNCHECKED, None)}, (
        "not even read"
    )


def test_look_ends_when_its_time_is_up(home: Path) -> None:
    for step in (1, 2):
        save(home, step)
    answers = iter([True] * 5)  # the folder, two pieces of the manifest, its files, the first of them
    result = inspect_checkpoints(home, JOB, may_look=lambda: next(answers, False)).items
    assert [item.state for item in result] == [SavedState.COMPLETE, SavedState.UNCHECKED]


def test_files_of_what_is_unfinished_count_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(home, 5).rename(home / JOB / ".unfinished-step-000000000005-1-0")
    save(home, 4)
    monkeypatch.setattr(checkpoint_reader, "MAX_FILES", 2)
    assert states(home) == {5: SavedState.UNFINISHED, 4: SavedState.UNCHECKED}


def test_what_a_program_saves_by_itself_is_listed_beside_the_checkpoints(home: Path) -> None:
    save(home, 1)
    save(home, 2).rename(home / JOB / ".unfinished-step-000000000002-1-0")
    record_save(str(home / JOB), "step-000000000001-1-0", ("directory",), None)
    (home / JOB / "last.pt").write_bytes(DATA)
    inside = home / JOB / "checkpoint-500" / "optimizer"
    inside.mkdir(parents=True)
    (inside / "a.pt").write_bytes(DATA)
    (inside.parent / "model.safetensors").write_bytes(DATA)
    os.utime(home / JOB / "last.pt", (100.0, 100.0))
    checkpoints = inspect_checkpoints(home, JOB)
    assert [item.step for item in checkpoints.items] == [2, 1]
    assert [(item.name, item.size_bytes) for item in checkpoints.program_saves] == [
        ("checkpoint-500/", 2 * len(DATA)),
        ("last.pt", len(DATA)),
    ]
    assert (checkpoints.program_saves[1].saved_at, checkpoints.num_program_saves) == (100.0, 2)


def test_links_and_pipes_are_no_saves_and_are_not_followed(home: Path) -> None:
    (home / "secret").mkdir()
    (home / "secret" / "key").write_bytes(DATA)
    (home / JOB / "model").symlink_to(home / "secret")
    (home / JOB / "model.pt").symlink_to(home / "secret" / "key")
    os.mkfifo(home / JOB / "pipe")
    (home / JOB / "run").mkdir()
    (home / JOB / "run" / "inside").symlink_to(home / "secret")
    assert [
        (program_save.name, program_save.size_bytes)
        for program_save in inspect_checkpoints(home, JOB).program_saves
    ] == [("run/", 0)]


def test_saves_with_odd_names_are_told_as_text(home: Path) -> None:
    Path(os.fsdecode(bytes(home / JOB) + b"/\xff.pt")).write_bytes(DATA)
    (only,) = inspect_checkpoints(home, JOB).program_saves
    assert only.name == "\ufffd.pt"
    assert msgspec.json.encode(only)


def test_only_the_newest_saves_are_listed_and_a_look_is_bounded(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        path = home / JOB / f"{number}.pt"
        path.write_bytes(DATA)
        os.utime(path, (number, number))
    monkeypatch.setattr(checkpoint_reader, "MAX_PROGRAM_SAVES", 2)
    checkpoints = inspect_checkpoints(home, JOB)
    assert (
        [program_save.name for program_save in checkpoints.program_saves],
        checkpoints.num_program_saves,
    ) == (["5.pt", "4.pt"], 6)
    monkeypatch.setattr(checkpoint_reader, "MAX_LOOKED_AT", 3)
    cut = inspect_checkpoints(home, JOB)
    assert (cut.num_program_saves, cut.is_truncated, checkpoints.is_truncated) == (3, True, False)
    none = inspect_checkpoints(home, JOB, may_look=lambda: False)
    assert (none.program_saves, none.is_truncated) == ((), True)


def test_folder_with_more_entries_than_are_read_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        (home / JOB / f"{number}.pt").touch()
    monkeypatch.setattr(checkpoint_reader, "MAX_ENTRIES", 3)
    assert not inspect_checkpoints(home, JOB).is_truncated
    (home / JOB / "3.pt").touch()
    assert inspect_checkpoints(home, JOB).is_truncated


def test_folder_that_was_not_looked_at_in_full_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / JOB / "run").mkdir()
    for number in range(6):
        (home / JOB / "run" / f"{number}.pt").write_bytes(DATA)
    monkeypatch.setattr(checkpoint_reader, "MAX_LOOKED_AT", 3)
    (run,) = inspect_checkpoints(home, JOB).program_saves
    assert (run.size_bytes, run.problem) == (
        2 * len(DATA),
        "not all of it was looked at, and its size is only of what was",
    )


def test_folder_that_is_deeper_than_a_look_says_so(home: Path) -> None:
    deep = home / JOB / "run" / "1" / "2" / "3"
    deep.mkdir(parents=True)
    (deep / "a.pt").write_bytes(DATA)
    (run,) = inspect_checkpoints(home, JOB).program_saves
    assert (run.size_bytes, run.problem) == (0, "what lies deeper than 3 folders is not counted")


def test_save_that_cannot_be_read_is_listed_with_the_error(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = home / JOB / "run" / "part"
    inside.mkdir(parents=True)
    (inside.parent / "a.pt").write_bytes(DATA)
    (home / JOB / "broken").mkdir()
    (home / JOB / "removed").mkdir()
    honest = os.open

    def refuse(path: str, flags: int, **more: Any) -> int:
        """As it is for who is not root."""
        if path == "part":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if path == "broken":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if path == "removed":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return honest(path, flags, **more)

    monkeypatch.setattr("shoal.engines.checkpoint_reader.os.open", refuse)
    result = {
        program_save.name: program_save for program_save in inspect_checkpoints(home, JOB).program_saves
    }
    assert (result["run/"].size_bytes, result["run/"].problem) == (
        len(DATA),
        "part cannot be read: Permission denied",
    )
    assert result["broken/"].problem == "broken cannot be read: Input/output error"
    assert result["broken/"].saved_at > 0.0
    assert set(result) == {"run/", "broken/"}, "what was removed meanwhile is no save"


def test_a_manifest_that_grows_when_it_is_read_is_damaged_and_costs_its_bound(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job hears by inotify that its manifest is opened, and makes it 3 GiB long, without any disk."""
    path = home / JOB / "step-000000000001-1-0"
    path.mkdir()
    (path / MANIFEST).write_bytes(b"{}")
    num_read, read = 0, os.read

    def grow_first(fd: int, count: int) -> bytes:
        nonlocal num_read
        if os.path.samestat(os.fstat(fd), (path / MANIFEST).stat()):
            os.truncate(path / MANIFEST, 3 << 30)
            piece = read(fd, count)
            num_read += len(piece)
            return piece
        return read(fd, count)

    monkeypatch.setattr(os, "read", grow_first)
    (item,) = inspect_checkpoints(home, JOB).items
    assert item.state is SavedState.DAMAGED
    assert "longer than" in item.problem
    assert num_read == checkpoint_reader.MAX_MANIFEST + 1


def test_all_manifests_of_one_look_together_are_bounded(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_reader, "MAX_READ", 2000)
    for step in range(1, 6):
        path = home / JOB / f"step-{step:012d}-1-0"
        path.mkdir()
        (path / MANIFEST).write_bytes(b" " * 1500)
    states = [item.state for item in inspect_checkpoints(home, JOB).items]
    assert states == [*[SavedState.DAMAGED] * 2, *[SavedState.UNCHECKED] * 3]


def test_a_look_that_has_no_time_left_reads_no_more_of_a_manifest(home: Path) -> None:
    path = home / JOB / "step-000000000001-1-0"
    path.mkdir()
    (path / MANIFEST).write_bytes(b" " * (1 << 20))
    looks = iter([True, True, True])
    (item,) = inspect_checkpoints(home, JOB, may_look=lambda: next(looks, False)).items
    assert item.state is SavedState.UNCHECKED
