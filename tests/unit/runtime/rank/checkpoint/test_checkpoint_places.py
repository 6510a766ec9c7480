"""Where checkpoints are kept: who may commit, what stays, and what another process can do to it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import SpecError, StateError
from shoal.runtime.rank.checkpoint.bucket_store import BucketStore, open_bucket
from shoal.runtime.rank.checkpoint.folder_store import FolderStore
from shoal.runtime.rank.checkpoint.manifest import (
    CheckpointManifest,
    CheckpointName,
    Fence,
    FileRecord,
    parse_name,
)
from shoal.runtime.rank.checkpoint.parts import assign_owners
from shoal.runtime.rank.checkpoint.schedule import expected_mtbf_s, steps_between, young_daly_s

DATA = b"weights"
OLD_ATTEMPT = """
import sys
from shoal.errors import StateError
from tests.unit.runtime.rank.checkpoint.test_checkpoint_places import begin, manifest
from shoal.runtime.rank.checkpoint.folder_store import FolderStore
from shoal.runtime.rank.checkpoint.manifest import Fence
folder, fence = FolderStore(sys.argv[1], keep=3), Fence(epoch=1)
folder.claim(fence)
begin(folder, 10, fence)
print("written", flush=True)
sys.stdin.readline()
try:
    begin(folder, 10, fence)
    folder.commit(manifest(10, fence), fence)
except StateError as error:
    print(error.message)
"""


def manifest(step: int, fence: Fence) -> CheckpointManifest:
    record = FileRecord(num_bytes=len(DATA), sha256=hashlib.sha256(DATA).hexdigest())
    return CheckpointManifest(
        job_id="j1",
        step=step,
        epoch=fence.epoch,
        rendezvous_round=fence.rendezvous_round,
        world_size=1,
        run_s=0.0,
        files={"data": record},
    )


def begin(folder: FolderStore, step: int, fence: Fence) -> None:
    path = Path(folder.unfinished(CheckpointName(fence, step)))
    path.mkdir(parents=True, exist_ok=True)
    (path / "data").write_bytes(DATA)


def save(folder: FolderStore, step: int, fence: Fence) -> None:
    begin(folder, step, fence)
    folder.commit(manifest(step, fence), fence)


def test_a_stale_process_that_had_written_everything_cannot_commit(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OLD_ATTEMPT, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[5]
    ) as old:
        assert old.stdout is not None
        assert old.stdin is not None
        assert old.stdout.readline() == "written\n"
        folder, fence = FolderStore(str(tmp_path), keep=3), Fence(epoch=2)
        folder.claim(fence)
        assert list(tmp_path.glob(".unfinished-*")) == [], "what it had begun is gone"
        save(folder, 5, fence)
        old.stdin.write("go on\n")
        old.stdin.flush()
        assert "attempt 2, group 0 has taken over" in old.stdout.readline()
    assert folder.names() == [CheckpointName(fence, 5)]


def test_a_commit_that_was_cut_short_is_not_there(tmp_path: Path) -> None:
    folder, fence = FolderStore(str(tmp_path), keep=3), Fence(epoch=1)
    folder.claim(fence)
    save(folder, 1, fence)
    begin(folder, 2, fence)
    assert folder.names() == [CheckpointName(fence, 1)]


def test_later_round_of_an_attempt_fences_off_the_earlier_one(tmp_path: Path) -> None:
    folder, before, after = (
        FolderStore(str(tmp_path), keep=3),
        Fence(epoch=1),
        Fence(epoch=1, rendezvous_round=1),
    )
    folder.claim(before)
    folder.claim(after)
    begin(folder, 1, before)
    with pytest.raises(StateError):
        folder.commit(manifest(1, before), before)
    with pytest.raises(StateError):
        folder.claim(before)


def test_outside_of_shoal_each_claim_is_higher_than_the_last(tmp_path: Path) -> None:
    folder = FolderStore(str(tmp_path), keep=3)
    assert [folder.claim(None).epoch for _ in range(3)] == [1, 2, 3]


def test_the_one_just_committed_stays_though_older_attempts_had_gone_further(tmp_path: Path) -> None:
    folder = FolderStore(str(tmp_path), keep=1)
    for epoch, step in ((1, 100), (2, 50)):
        folder.claim(Fence(epoch=epoch))
        save(folder, step, Fence(epoch=epoch))
    assert folder.names() == [CheckpointName(Fence(epoch=2), 50)]


def test_names_sort_by_attempt_then_group_then_step() -> None:
    texts = ["step-000000000009-1-0", "step-000000000005-2-0", "step-000000000004-2-1"]
    names = [parse_name(text) for text in reversed(texts)]
    assert [str(name) for name in sorted(name for name in names if name)] == texts
    assert parse_name(".unfinished-step-000000000009-1-0") is None


def test_a_stale_attempt_cannot_commit_to_a_bucket_either() -> None:
    store = pytest.importorskip("obstore.store").MemoryStore()
    old, new = (BucketStore(store, "memory://", keep=3) for _ in range(2))
    old.claim(Fence(epoch=1))
    old.commit(manifest(1, Fence(epoch=1)), Fence(epoch=1))
    new.claim(Fence(epoch=2))
    with pytest.raises(StateError):
        old.commit(manifest(2, Fence(epoch=1)), Fence(epoch=1))
    assert [name.step for name in new.names()] == [1]


def test_a_claim_between_reading_and_writing_the_index_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    store = pytest.importorskip("obstore.store").MemoryStore()
    old, new = (BucketStore(store, "memory://", keep=3) for _ in range(2))
    old.claim(Fence(epoch=1))
    read = old._read

    def read_then_be_overtaken() -> Any:
        index = read()
        monkeypatch.undo()
        new.claim(Fence(epoch=2))
        return index

    monkeypatch.setattr(old, "_read", read_then_be_overtaken)
    with pytest.raises(StateError):
        old.commit(manifest(2, Fence(epoch=1)), Fence(epoch=1))
    assert new.names() == []


def test_a_store_that_ignores_conditions_is_refused() -> None:
    pytest.importorskip("obstore.store")

    class Careless:
        def put(self, path: str, data: bytes, **options: object) -> None:
            pass

    with pytest.raises(SpecError, match="ignores conditions"):
        BucketStore(Careless(), "s3://careless", keep=3).claim(Fence(epoch=1))


def test_url_of_unknown_scheme_is_refused() -> None:
    pytest.importorskip("obstore.store")
    with pytest.raises(SpecError, match="gopher") as refused:
        open_bucket("gopher://somewhere/else", keep=3)
    assert refused.value.message.startswith(
        "checkpoints cannot be kept at `gopher://somewhere/else`: Unable to recognise URL "
    )
    assert "; write `s3://BUCKET/PATH`, " in refused.value.message
    assert "Debug source" not in "".join(traceback.format_exception(refused.value)), "a program prints that"


def test_unreachable_bucket_is_reported_in_one_line() -> None:
    exceptions = pytest.importorskip("obstore.exceptions")

    class Away:
        def put(self, path: str, data: bytes, **options: object) -> None:
            raise exceptions.GenericError("Generic S3 error: no such bucket\n\nDebug source:\nGeneric { .. }")

    with pytest.raises(StateError) as refused:
        BucketStore(Away(), "s3://away", keep=3).claim(Fence(epoch=1))
    message = "checkpoints cannot be kept at s3://away: no such bucket; is there such a bucket, "
    assert refused.value.message.startswith(message)


def test_what_all_hold_is_written_by_all_and_what_one_holds_by_that_one() -> None:
    same = {"a": 40, "b": 30, "c": 20, "d": 10}
    owners = assign_owners([same | {"means": 0}, same | {"mine": 5, "means": 0}])
    loads = [sum(size for key, size in same.items() if owners[key] == rank) for rank in (0, 1)]
    assert loads == [50, 50]
    assert owners["mine"] == 1
    assert owners["means"] == 0


def test_the_interval_grows_with_the_root_of_cost_and_time_between_failures() -> None:
    assert young_daly_s(2.0, 3600.0) == pytest.approx(120.0)
    assert young_daly_s(8.0, 3600.0) == pytest.approx(240.0)
    assert steps_between(cost_s=2.0, written_s=1.0, mtbf_s=3600.0, step_s=7.0) == 18
    assert steps_between(cost_s=0.0, written_s=9.0, mtbf_s=3600.0, step_s=2.0) == 5, "one at a time"
    assert steps_between(cost_s=0.0, written_s=0.0, mtbf_s=3600.0, step_s=2.0) == 1


def test_failures_that_were_seen_outweigh_those_expected() -> None:
    calm = expected_mtbf_s(num_nodes=1, failures=0, run_s=0.0)
    assert calm == pytest.approx(86400 / 6.5e-3)
    assert expected_mtbf_s(num_nodes=8, failures=0, run_s=0.0) == pytest.approx(calm / 8)
    assert expected_mtbf_s(num_nodes=1, failures=99, run_s=calm) == pytest.approx(calm / 50)
