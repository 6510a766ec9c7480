"""Two control planes over one spool: what the one before has not finished to write never appears."""

# What is tested is files and processes: polling for them and touching them is the point.

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.engines.local.spool_index import SpoolIndex
from shoal.errors import Deposed, EngineUnreachable
from shoal.model.evidence import Evidence
from tests.support.fakes.local_engine import LocalEngineLab
from tests.unit.engines.test_local_replace import LOST, anew, lose, until

pytestmark = pytest.mark.anyio


async def test_deposed_engine_starts_nothing(local: LocalEngineLab) -> None:
    old = local.restart(term=4)
    local.restart(term=5)
    with pytest.raises(EngineUnreachable, match="No such file"):
        await old.submit(local.submission("is deaf"))
    assert await local.engine.list_owned() == []
    assert await old.list_owned() == []
    await local.engine.submit(local.submission("is deaf"))
    await local.until(Evidence.ALIVE)


async def test_engine_deposed_in_the_middle_of_a_submission_has_started_nothing(
    local: LocalEngineLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen right before the rename that makes it so, and continued after the next one began."""
    old = local.restart(term=4)
    rename, is_frozen = Path.rename, True

    def frozen(self: Path, target: Path) -> Path:
        nonlocal is_frozen
        if is_frozen and target.parent.name == "live":
            is_frozen = False
            local.restart(term=5)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", frozen)
    with pytest.raises(EngineUnreachable, match="No such file"):
        await old.submit(local.submission("is deaf"))
    assert await local.engine.list_owned() == []
    assert not is_frozen


async def test_deposed_engine_removes_no_task_that_its_successor_replaced(
    local: LocalEngineLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.restart(term=4)
    submission = await lose(local)
    old, again = local.engine, anew(submission)
    rename, is_frozen = Path.rename, True

    def frozen(self: Path, target: Path) -> Path:
        nonlocal is_frozen
        if is_frozen and self.name == LOST:
            is_frozen = False
            local.restart(term=5)
            local.engine._submit(again)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", frozen)
    with pytest.raises(EngineUnreachable, match="No such file"):
        await old.submit(again)
    assert not is_frozen
    seen = await until(local, LOST, Evidence.ALIVE)
    assert seen.replacement == 1


@pytest.mark.parametrize("left", ["000000000009", "att_0.1"])
def test_drafts_of_earlier_terms_are_removed(tmp_path: Path, left: str) -> None:
    (tmp_path / "spool" / "draft" / left / "sim-01").mkdir(parents=True)
    index = SpoolIndex(tmp_path, 10)
    assert [path.name for path in (tmp_path / "spool" / "draft").iterdir()] == [index.directory.draft.name]


def test_engine_that_opens_after_a_later_term_is_deposed(tmp_path: Path) -> None:
    """It took the term, was frozen, and opens its spool after its successor has."""
    successor = SpoolIndex(tmp_path, 10)
    with pytest.raises(Deposed, match="began term 10"):
        SpoolIndex(tmp_path, 9)
    assert list((tmp_path / "spool" / "draft").iterdir()) == [successor.directory.draft]
