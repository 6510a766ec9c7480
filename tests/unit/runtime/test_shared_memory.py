"""What ranks leave in the memory of a node is given back, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.runtime import shared_memory, spool
from shoal.runtime.shared_memory import folder, give_back
from shoal.wire import EndKind
from tests.support.shares import Start, an_order, shares_in


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "MEMORY", str(tmp_path))
    return tmp_path


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with shares_in(tmp_path / "home") as make:
        yield make


def test_memory_of_this_attempt_on_this_node_is_removed_and_a_link_is_not_followed(memory: Path) -> None:
    order = an_order(attempt_id="att_1", node="n1", nodes=("n1",))
    mine = Path(folder(os.getuid(), "att_1", "n1"))
    others = [Path(folder(os.getuid(), job, node)) for job, node in (("att_2", "n1"), ("att_1", "n2"))]
    for made in (mine, *others):
        (made / "step").mkdir(parents=True)
        (made / "step" / "shard").write_bytes(b"x")
    give_back(order)
    give_back(order)
    assert not mine.exists()
    assert all(other.exists() for other in others)
    mine.symlink_to(others[0])
    give_back(order)
    assert not mine.is_symlink()
    assert (others[0] / "step" / "shard").exists()


def test_share_without_a_sandbox_leaves_nothing_in_memory(start: Start, tmp_path: Path) -> None:
    run = f"att_{os.getpid()}"
    order = an_order(attempt_id=run, confinement=())
    mine = Path(folder(os.getuid(), run, order.node))
    share = start(order)
    mine.mkdir(mode=0o700)
    (mine / "shard").write_bytes(b"x")
    assert share.run().kind is EndKind.SUCCEEDED
    assert not mine.exists()


def test_memory_of_a_share_whose_supervisor_was_killed_goes_with_its_leftovers(
    memory: Path, tmp_path: Path
) -> None:
    order = an_order(attempt_id="att_1")
    share = spool.Share(tmp_path / "share")
    Path(share.directory).mkdir()
    spool.write_order(share, order)
    mine = Path(folder(os.getuid(), "att_1", order.node))
    mine.mkdir()
    assert spool.kill_leftovers(share.directory)
    assert not mine.exists()
