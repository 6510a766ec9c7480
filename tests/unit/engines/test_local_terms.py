"""Two control planes over one spool: what the one before has not finished to write never appears."""

# What is tested is files and processes: polling for them and touching them is the point.

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.engines.base import Sight
from shoal.engines.local.book import Book
from shoal.errors import Deposed, EngineUnreachable
from tests.support.local_engine import Local
from tests.unit.engines.test_local_replace import LOST, anew, lose, until

pytestmark = pytest.mark.anyio


async def test_deposed_engine_starts_nothing(local: Local) -> None:
    old = local.reborn(term=4)
    local.reborn(term=5)
    with pytest.raises(EngineUnreachable, match="No such file"):
        await old.submit(local.submission("is deaf"))
    assert await local.engine.list_owned() == []
    assert await old.list_owned() == []
    await local.engine.submit(local.submission("is deaf"))
    await local.until(Sight.ALIVE)


async def test_engine_deposed_in_the_middle_of_a_submission_has_started_nothing(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen right before the rename that makes it so, and continued after the next one began."""
    old = local.reborn(term=4)
    rename, is_frozen = Path.rename, True

    def frozen(self: Path, target: Path) -> Path:
        nonlocal is_frozen
        if is_frozen and target.parent.name == "live":
            is_frozen = False
            local.reborn(term=5)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", frozen)
    with pytest.raises(EngineUnreachable, match="No such file"):
        await old.submit(local.submission("is deaf"))
    assert await local.engine.list_owned() == []
    assert not is_frozen


async def test_deposed_engine_takes_no_share_away_that_its_successor_began_anew(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.reborn(term=4)
    submission = await lose(local)
    old, again = local.engine, anew(submission)
    rename, is_frozen = Path.rename, True

    def frozen(self: Path, target: Path) -> Path:
        nonlocal is_frozen
        if is_frozen and self.name == LOST:
            is_frozen = False
            local.reborn(term=5)
            local.engine._submit(again)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", frozen)
    with pytest.raises(EngineUnreachable, match="No such file"):
        await old.submit(again)
    assert not is_frozen
    seen = await until(local, LOST, Sight.ALIVE)
    assert seen.incarnation == 1


@pytest.mark.parametrize("left", ["000000000009", "att_0.1"])
def test_what_others_left_half_made_is_gone(tmp_path: Path, left: str) -> None:
    (tmp_path / "spool" / "draft" / left / "sim-01").mkdir(parents=True)
    book = Book(tmp_path, 10)
    assert [path.name for path in (tmp_path / "spool" / "draft").iterdir()] == [book.draft.name]


def test_one_that_comes_late_to_its_own_term_learns_that_another_leads(tmp_path: Path) -> None:
    """It took the term, was frozen, and opens its spool after its successor has."""
    successor = Book(tmp_path, 10)
    with pytest.raises(Deposed, match="began term 10"):
        Book(tmp_path, 9)
    assert successor.draft.is_dir()
    assert [path.name for path in (tmp_path / "spool" / "draft").iterdir()] == [successor.draft.name]
