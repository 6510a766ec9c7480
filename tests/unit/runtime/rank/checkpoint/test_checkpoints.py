"""Saving and loading what a program trains: alone, and in real ranks of a group."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from shoal.errors import SpecError, StateError
from shoal.runtime.rank.checkpoint import checkpoints
from shoal.runtime.rank.checkpoint.background_save import CheckpointStage
from shoal.runtime.rank.checkpoint.bucket_store import BucketStore
from shoal.runtime.rank.checkpoint.checkpoints import Checkpoints
from shoal.runtime.rank.checkpoint.folder_store import FolderStore
from shoal.runtime.rank.checkpoint.manifest import STATUS, IntervalReason, read_status
from shoal.runtime.rank.checkpoint.peers import Peers
from tests.support.runtime import training_ranks
from tests.support.runtime.training_ranks import build, full_tensors, is_same, launch, train

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for checkpoints, with nothing of a job in the environment."""
    for name in (
        "SHOAL_EPOCH",
        "SHOAL_RENDEZVOUS_ROUND",
        "SHOAL_CHECKPOINT_DIR",
        "SHOAL_CHECKPOINT_INTERVAL_S",
        "RANK",
        "WORLD_SIZE",
    ):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "checkpoints"


def saved(home: Path, *steps: int, **options: Any) -> tuple[training_ranks.Parts, Checkpoints]:
    """Parts trained and saved at these steps."""
    parts, kept, done = build(), Checkpoints(str(home), **options), 0
    for step in steps:
        train(parts, done, step)
        kept.save(parts, step)
        done = step
    assert kept.wait() == (steps[-1] if steps else None)
    return parts, kept


def damage(home: Path, step: int, pattern: str = "*.distcp") -> None:
    (victim,) = home.glob(f"step-{step:012d}-*/{pattern}")
    data = victim.read_bytes()
    victim.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ranks_resume_exactly_with_ddp_and_fsdp_and_one_process_reads_what_they_sharded(home: Path) -> None:
    home.mkdir()
    launch(training_ranks.resume_exactly, 2, str(home))
    for kind in ("ddp", "fsdp"):
        alone = build(seed=1)
        assert Checkpoints(str(home / kind)).load(alone) == 3
        assert is_same(full_tensors(alone), torch.load(home / f"{kind}.pt", weights_only=True))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_ranks_shard_what_one_saved_and_all_pass_over_a_damaged_one(home: Path) -> None:
    parts, _ = saved(home / "plain", 3)
    torch.save(full_tensors(parts), home / "plain.pt")
    launch(training_ranks.load_of_one_process, 2, str(home))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_processes_that_form_another_group_while_a_save_is_under_way_go_on_saving(home: Path) -> None:
    launch(training_ranks.go_on_in_another_group, 2, str(home), training_ranks.free_port())


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_rank_that_cannot_start_a_save_blocks_no_other(home: Path) -> None:
    launch(training_ranks.save_where_one_rank_cannot, 2, str(home))


def test_rank_that_replaces_another_saves_when_the_survivors_do(home: Path) -> None:
    _, survivor = saved(home, 1)
    newcomer = Checkpoints(str(home))
    for one in (survivor, newcomer):
        one.resume(50)
    due = [[step for step in range(51, 70) if one.is_due(step)] for one in (survivor, newcomer)]
    assert due[0] == due[1] != []


def test_ranks_connect_for_saves_when_they_resume_and_not_at_the_first_save(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Peers] = []

    def connect() -> Peers:
        made.append(Peers())
        return made[-1]

    monkeypatch.setattr(checkpoints, "Peers", connect)
    parts, again = build(), Checkpoints(str(home))
    again.resume(4)
    assert len(made) == 1
    again.save(parts, 5)
    assert again.wait() == 5
    assert len(made) == 1


def test_a_run_resumed_alone_ends_with_the_same_weights(home: Path) -> None:
    parts, _ = saved(home, 2, 4)
    again = build(seed=1)
    assert Checkpoints(str(home)).load(again) == 4
    train(parts, 4, 7)
    train(again, 4, 7)
    assert is_same(full_tensors(parts), full_tensors(again))


def test_an_optimizer_waits_until_the_state_before_its_step_is_copied(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_copy, copied = threading.Event(), CheckpointStage.copy

    def slow_copy(stage: CheckpointStage, state: dict[str, Any]) -> dict[str, Any]:
        may_copy.wait(30)
        return copied(stage, state)

    monkeypatch.setattr(CheckpointStage, "copy", slow_copy)
    parts, checkpoints = build(has_means=True), Checkpoints(str(home))
    train(parts, 0, 2)
    before = full_tensors(parts)
    checkpoints.save(parts, 2)
    threading.Timer(0.2, may_copy.set).start()
    train(parts, 2, 3)
    checkpoints.wait()
    again = build(seed=1, has_means=True)
    assert Checkpoints(str(home)).load(again) == 2
    assert is_same(full_tensors(again), before), (
        "also the running means, which the forward pass has changed since"
    )
    assert not is_same(full_tensors(parts), before)


@pytest.mark.parametrize("pattern", ["*.distcp", ".metadata", "manifest.json"])
def test_a_damaged_checkpoint_is_passed_over_with_a_message(
    home: Path, pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(home, 2, 4)
    damage(home, 4, pattern)
    assert Checkpoints(str(home)).load(build()) == 2
    assert "passing over step-000000000004" in capsys.readouterr().err


def test_a_checkpoint_with_a_file_missing_is_passed_over(home: Path) -> None:
    saved(home, 2, 4)
    next(home.glob("step-000000000004-*/*.distcp")).unlink()
    assert Checkpoints(str(home)).load(build()) == 2


def test_nothing_whole_is_nothing(home: Path) -> None:
    saved(home, 2)
    damage(home, 2)
    assert Checkpoints(str(home)).load(build()) is None


def test_only_the_newest_are_kept(home: Path) -> None:
    saved(home, 1, 2, 3, 4, keep=2)
    assert [name.step for name in FolderStore(str(home), keep=2).names()] == [4, 3]


def test_later_run_fences_off_the_earlier_one(home: Path) -> None:
    parts, first = saved(home, 1)
    Checkpoints(str(home)).load(build())
    first.save(parts, 2)
    with pytest.raises(StateError, match="attempt 2, group 0 has taken over"):
        first.wait()
    assert [name.step for name in FolderStore(str(home), keep=2).names()] == [1]


def test_an_attempt_with_a_lower_number_cannot_even_begin(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_EPOCH", "3")
    saved(home, 1)
    monkeypatch.setenv("SHOAL_EPOCH", "2")
    with pytest.raises(StateError, match="attempt 3"):
        Checkpoints(str(home)).load(build())


def test_failed_save_is_reported_and_training_continues(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, checkpoints = saved(home, 1)
    shutil.rmtree(home)
    home.write_text("in the way")
    checkpoints.save(parts, 2)
    assert checkpoints.wait() == 1
    assert "step 2 was not saved" in capsys.readouterr().err


def test_another_model_is_refused_by_name(home: Path) -> None:
    saved(home, 1)
    other = build()
    other["model"].append(torch.nn.Linear(4, 4))
    other["optimizer"] = torch.optim.AdamW(other["model"].parameters())
    with pytest.raises(SpecError, match="does not fit this program"):
        Checkpoints(str(home)).load(other)


def test_unknown_directory_is_refused(home: Path) -> None:
    with pytest.raises(SpecError, match="no directory"):
        Checkpoints()


def test_save_is_due_at_the_given_interval_or_by_its_cost(home: Path) -> None:
    fixed = Checkpoints(str(home), every=4)
    assert [step for step in range(10) if fixed.is_due(step)] == [4, 8]
    parts, by_cost = build(), Checkpoints(str(home))
    by_cost.load(parts)
    train(parts, 0, 1)
    assert by_cost.is_due(1)
    by_cost.save(parts, 1)
    assert not by_cost.is_due(2)


def test_an_interval_of_the_job_goes_before_what_the_program_says(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CHECKPOINT_INTERVAL_S", "600")
    parts, checkpoints = build(), Checkpoints(str(home), every=1)
    checkpoints.load(parts)
    train(parts, 0, 1)
    assert checkpoints.is_due(1), "one soon, to see what it costs"
    checkpoints.save(parts, 1)
    assert not checkpoints.is_due(2)
    decision = checkpoints._pace.decision
    assert decision is not None
    assert (decision.reason, decision.interval_s) == (IntervalReason.INTERVAL, 600.0)
    assert decision.steps == max(1, round(600.0 / decision.step_s))


def test_what_saves_cost_is_left_beside_them(home: Path) -> None:
    saved(home, 1, 2)
    status = read_status((home / STATUS).read_bytes())
    assert status is not None
    assert list(status.places_by_name) == ["step-000000000001-1-0", "step-000000000002-1-0"]
    assert status.decision is not None
    assert status.decision.reason is IntervalReason.COST
    assert status.decision.cost_s is not None
    assert status.decision.mtbf_s is not None
    assert status.decision.steps >= 1


def test_a_checkpoint_in_memory_is_found_first_and_the_directory_has_it_too(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.runtime.files.checkpoint_storage.MEMORY", str(tmp_path))
    saved(home, 1, 2, memory=True)
    (memory,) = tmp_path.glob("shoal-*")
    assert len(list(memory.glob("step-*"))) == 1
    assert len(list(home.glob("step-*"))) == 2
    shutil.rmtree(home)
    assert Checkpoints(str(home), memory=True).load(build()) == 2


def test_a_bucket_has_what_a_lost_directory_had(home: Path) -> None:
    store = pytest.importorskip("obstore.store").MemoryStore()
    checkpoints = Checkpoints(str(home), keep=2)
    checkpoints._tiers.places.append(BucketStore(store, "memory://", keep=2))
    parts = build()
    for step in (1, 2, 3):
        train(parts, step - 1, step)
        checkpoints.save(parts, step)
    checkpoints.wait()
    kept = {entry["path"].split("/")[0] for page in store.list() for entry in page}
    assert kept == {"index.json", "probe", "step-000000000003-1-0", "step-000000000002-1-0"}
    shutil.rmtree(home)
    again, later = build(seed=1), Checkpoints(str(home), keep=2)
    later._tiers.places.append(BucketStore(store, "memory://", keep=2))
    assert later.load(again) == 3
    assert is_same(full_tensors(parts), full_tensors(again))
