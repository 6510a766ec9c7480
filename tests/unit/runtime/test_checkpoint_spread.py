"""Checkpoints in the memory of several nodes survive the loss of one node."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.support.runtime import training_ranks
from tests.support.runtime.training_ranks import launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(autouse=True)
def outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "SHOAL_EPOCH",
        "SHOAL_RENDEZVOUS_ROUND",
        "SHOAL_CHECKPOINT_DIR",
        "SHOAL_CHECKPOINT_INTERVAL_S",
    ):
        monkeypatch.delenv(f"SHOAL_{name}", raising=False)


@pytest.mark.parametrize(
    ("kind", "per_node", "lost"), [pytest.param("fsdp", 2, 1, marks=pytest.mark.soak), ("ddp", 1, 0)]
)
def test_neighbours_memory_replaces_a_lost_nodes(tmp_path: Path, kind: str, per_node: int, lost: int) -> None:
    launch(training_ranks.lose_a_node, 2 * per_node, str(tmp_path), kind, per_node, lost)


def test_checkpoint_damaged_in_all_memories_is_read_from_disk(tmp_path: Path) -> None:
    launch(training_ranks.lose_both_nodes, 2, str(tmp_path))
