"""Checkpoints in the memory of several nodes: one node is lost, and all of it is still there."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.support import training_ranks
from tests.support.training_ranks import launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(autouse=True)
def outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHOAL_EPOCH", "SHOAL_GENERATION", "SHOAL_CHECKPOINT_DIR", "SHOAL_CHECKPOINT_INTERVAL_S"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("kind", "per_node", "lost"), [pytest.param("fsdp", 2, 1, marks=pytest.mark.soak), ("ddp", 1, 0)]
)
def test_memory_of_a_neighbour_has_what_a_lost_node_had(
    tmp_path: Path, kind: str, per_node: int, lost: int
) -> None:
    launch(training_ranks.lose_a_node, 2 * per_node, str(tmp_path), kind, per_node, lost)


def test_what_is_damaged_in_all_memories_is_passed_over_for_the_disk(tmp_path: Path) -> None:
    launch(training_ranks.lose_both_nodes, 2, str(tmp_path))
