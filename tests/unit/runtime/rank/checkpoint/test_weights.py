"""A model that is served has the weights of the checkpoint, or is not served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from shoal.errors import SpecError, StateError
from shoal.runtime import load_model
from shoal.runtime.rank.checkpoint.checkpoints import Checkpoints

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def model(width: int = 4) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width))


def weights(of: torch.nn.Module) -> dict[str, list[float]]:
    return {name: value.flatten().tolist() for name, value in of.state_dict().items()}


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, list[float]]]:
    """Of three steps, in `tmp_path`."""
    for name in ("SHOAL_EPOCH", "SHOAL_RENDEZVOUS_ROUND", "SHOAL_MODEL_DIR", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.1)
    parts: dict[str, Any] = {"model": trained, "optimizer": optimizer}
    tensors = {}
    with Checkpoints(str(tmp_path)) as checkpoints:
        for step in (1, 2, 3):
            trained(torch.ones(5, 3) * torch.arange(5).unsqueeze(1)).sum().backward()
            optimizer.step()
            checkpoints.save(parts, step)
            checkpoints.wait()
            tensors[step] = weights(trained)
    return tensors


def test_newest_is_loaded_by_its_jobs_directory_and_any_by_its_own(
    saved: dict[int, dict[str, list[float]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = model()
    assert load_model(served, str(tmp_path)) == 3
    assert weights(served) == saved[3]
    monkeypatch.setenv("SHOAL_MODEL_DIR", str(tmp_path / "step-000000000002-1-0"))
    assert load_model(served) == 2
    assert weights(served) == saved[2]


def test_nothing_is_written_where_it_is_loaded_from(
    saved: dict[int, dict[str, list[float]]], tmp_path: Path
) -> None:
    def seen() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    before = seen()
    load_model(model(), str(tmp_path))
    assert seen() == before


def test_damaged_checkpoint_is_skipped_and_refused_when_named(
    saved: dict[int, dict[str, list[float]]], tmp_path: Path
) -> None:
    newest = tmp_path / "step-000000000003-1-0"
    [shard] = newest.glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    served = model()
    assert load_model(served, str(tmp_path)) == 2
    assert weights(served) == saved[2]
    with pytest.raises(StateError, match="is not what was written"):
        load_model(served, str(newest))


def test_another_model_and_nothing_at_all_are_refused(
    saved: dict[int, dict[str, list[float]]], tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match="does not fit this model"):
        load_model(model(width=5), str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(StateError, match="there is no checkpoint in"):
        load_model(model(), str(tmp_path / "empty"))
    with pytest.raises(StateError, match="SHOAL_MODEL_DIR is not set"):
        load_model(model())
