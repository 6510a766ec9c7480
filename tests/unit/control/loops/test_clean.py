"""What is removed, when, and what never is."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest
from sqlalchemy import func, select

from shoal.api.archives import Archives
from shoal.control.loops import clean as cleaning
from shoal.control.loops.clean import DAY_S, clean
from shoal.curve import Axis, Samples, single_point
from shoal.engines.local.spool_index import SpoolIndex
from shoal.errors import StateError
from shoal.model.people import Token
from shoal.spec import parse_job
from shoal.store import Tx, schema
from shoal.tar_check import TarLimits
from shoal.wire import LeftBehind
from tests.support.planes.bench import ANA, SPEC, USER, ControlPlaneLab, StagedEngine, result_of

DIGEST = "a" * 64


class PrunedEngine(StagedEngine):
    """Remembers what it was asked to prune."""

    def __init__(self, lab: ControlPlaneLab, checkpoints: tuple[str, ...] = ()) -> None:
        super().__init__(lab.cluster)
        self.asked: tuple[float, int] | None = None
        self.dirs = list(checkpoints)

    async def prune(self, older_than: float, max_bytes: int) -> int:
        self.asked = (older_than, max_bytes)
        return 0

    async def checkpoints(self) -> list[str]:
        return list(self.dirs)

    async def drop_checkpoint(self, job_id: str) -> None:
        self.dirs.remove(job_id)


def write(path: Path, written_at: float, size: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    os.utime(path, (written_at, written_at))
    return path


def archive(lab: ControlPlaneLab, age_s: float, digest: str = DIGEST) -> tuple[Path, Path]:
    folder = lab.settings.home / "archives"
    written_at = lab.clock.now() - age_s
    return write(folder / f"{digest}.tar", written_at), write(folder / "owners/lab" / digest, written_at)


def submit_with_archive(lab: ControlPlaneLab) -> str:
    spec = parse_job(SPEC)
    result = result_of(lab.plane.submit(ANA, spec, project="lab", owner=USER, archive_digest=DIGEST))
    return result.jobs[0].job_id


def test_answers_to_repeated_requests_are_kept_for_a_week() -> None:
    lab = ControlPlaneLab()
    lab.submit(key="k")
    lab.clock.advance(6 * DAY_S)
    anyio.run(clean, lab.core.records, lab.core.planning.planner, lab.core.link.engine, lab.core.settings)
    assert lab.submit_all(key="k").was_repeated
    lab.clock.advance(2 * DAY_S)
    anyio.run(clean, lab.core.records, lab.core.planning.planner, lab.core.link.engine, lab.core.settings)
    assert not lab.submit_all(key="k").was_repeated


def test_no_transaction_removes_more_than_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A year of lists, tokens or curves is removed in batches, so that other writes do not wait."""
    for name in ("MAX_DROPPED", "MAX_LISTS_DROPPED", "MAX_TOKENS_DROPPED", "MAX_POINTS_DROPPED"):
        monkeypatch.setattr(cleaning, name, 3)
    lab = ControlPlaneLab()
    points = tuple(single_point(step, 0.0) for step in range(10))
    curve = Samples(name="loss", axis=Axis.STEP, rank=0, points=points)

    def fill(tx: Tx) -> None:
        for number in range(10):
            tx.left_behind.put("lab", LeftBehind(folder=f"/{number}"), 0.0)
            tx.keys.remember("ana", f"k{number}", "f", b"{}", 0.0)
            tx.tokens.add(
                Token(
                    token_id=f"tok_{number}", user_id=USER.user_id, secret_hash=b"x", label="old",
                    created_at=0.0, revoked_at=1.0,
                )
            )  # fmt: skip
        tx.metrics.add("job_gone", 1, "n1", [curve], 0.0)

    result_of(lab.store.write(fill))
    lab.clock.advance(400 * DAY_S)
    left = [lab.read(rows)]
    write = lab.store.write

    async def counted(change: Callable[[Tx], Any], **options: Any) -> Any:
        answer = await write(change, **options)
        left.append(await lab.store.read(rows))
        return answer

    monkeypatch.setattr(lab.store, "write", counted)
    anyio.run(clean, lab.core.records, lab.core.planning.planner, lab.core.link.engine, lab.core.settings)
    assert max(before - after for before, after in pairwise(left)) == 3
    assert left[0] - left[-1] == 40


def rows(tx: Tx) -> int:
    """Numbers of replies, lists, tokens and points."""
    tables = (schema.idempotency_keys, schema.left_behind, schema.tokens, schema.metric_points)
    return sum(int(tx.session.value(select(func.count()).select_from(table), {})) for table in tables)


def test_archive_unused_for_a_week_goes_with_the_right_to_it(tmp_path: Path) -> None:
    lab = ControlPlaneLab(home=tmp_path)
    old, mark = archive(lab, 8 * DAY_S)
    young, young_mark = archive(lab, 6 * DAY_S, "b" * 64)
    anyio.run(clean, lab.core.records, lab.core.planning.planner, lab.core.link.engine, lab.core.settings)
    assert not old.exists()
    assert not mark.exists()
    assert young.exists()
    assert young_mark.exists()


def test_an_archive_stays_while_a_job_that_uses_it_is_open(tmp_path: Path) -> None:
    lab = ControlPlaneLab(home=tmp_path)
    path, mark = archive(lab, 30 * DAY_S)
    job_id = submit_with_archive(lab)
    anyio.run(clean, lab.core.records, lab.core.planning.planner, lab.core.link.engine, lab.core.settings)
    assert path.exists()
    assert mark.exists()
    result_of(lab.plane.stop_job(ANA, job_id))
    anyio.run(clean, lab.core.records, lab.core.planning.planner, lab.core.link.engine, lab.core.settings)
    assert not path.exists()
    with pytest.raises(StateError, match="working directory"):
        result_of(lab.plane.retry_job(ANA, job_id))


def test_request_for_an_archive_keeps_it(tmp_path: Path) -> None:
    lab = ControlPlaneLab(home=tmp_path)
    path, _ = archive(lab, 8 * DAY_S)
    assert Archives(tmp_path, TarLimits(1, 1), 1).size_for("lab", DIGEST) == 1
    assert path.stat().st_mtime > lab.clock.now() - 8 * DAY_S


def test_an_upload_that_never_ended_goes_after_a_day(tmp_path: Path) -> None:
    lab = ControlPlaneLab(home=tmp_path)
    old = write(tmp_path / "archives/.part-1", lab.clock.now() - 2 * DAY_S)
    young = write(tmp_path / "archives/.part-2", lab.clock.now())
    anyio.run(clean, lab.core.records, lab.core.planning.planner, lab.core.link.engine, lab.core.settings)
    assert not old.exists()
    assert young.exists()


def test_the_engine_is_told_how_long_logs_are_kept_and_how_much() -> None:
    lab = ControlPlaneLab()
    engine = lab.core.link.engine = PrunedEngine(lab)
    anyio.run(clean, lab.core.records, lab.core.planning.planner, lab.core.link.engine, lab.core.settings)
    assert engine.asked == (lab.clock.now() - 30 * DAY_S, 10 << 30)


def test_checkpoints_of_jobs_ended_long_ago_go_and_others_stay() -> None:
    lab = ControlPlaneLab()
    ended, still_open = lab.submit(), lab.submit()
    lab.stop(ended)
    engine = lab.core.link.engine = PrunedEngine(lab, (ended.job_id, still_open.job_id, "not_a_job"))
    lab.clock.advance(29 * DAY_S)
    anyio.run(clean, lab.core.records, lab.core.planning.planner, lab.core.link.engine, lab.core.settings)
    assert engine.dirs == [ended.job_id, still_open.job_id, "not_a_job"]
    lab.clock.advance(2 * DAY_S)
    anyio.run(clean, lab.core.records, lab.core.planning.planner, lab.core.link.engine, lab.core.settings)
    assert engine.dirs == [still_open.job_id, "not_a_job"]


def test_no_event_is_ever_cleaned_away() -> None:
    lab = ControlPlaneLab()
    lab.stop(lab.submit())
    before = lab.events()
    lab.clock.advance(1000 * DAY_S)
    anyio.run(clean, lab.core.records, lab.core.planning.planner, lab.core.link.engine, lab.core.settings)
    assert lab.events() == before


def test_kept_logs_go_by_age_and_then_oldest_first_until_they_fit(tmp_path: Path) -> None:
    index = SpoolIndex(tmp_path)
    spool = index.directory
    for number in range(5):
        write(spool.archived / f"att_{number}" / "n1" / "log", 1000.0 + number, size=100)
    write(spool.live / "att_9" / "n1" / "log", 1.0, size=100)
    assert index.prune(1001.5, 1 << 30) == 2
    assert index.prune(0.0, 250) == 1
    assert sorted(entry.name for entry in spool.archived.iterdir()) == ["att_3", "att_4"]
    assert list(spool.trash.iterdir()) == []
    assert (spool.live / "att_9" / "n1" / "log").exists()
