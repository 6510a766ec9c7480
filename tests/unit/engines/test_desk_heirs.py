"""A keeper whose share was lost beside others is still there: it has the order of the share in its place."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.engines.base import Submission
from shoal.engines.desk import HEIR_S, Desk
from shoal.engines.fake import VirtualClock
from shoal.engines.slurm.accounts import Account
from shoal.engines.slurm.render import Request
from shoal.errors import NotFound, StateError
from shoal.wire import EndKind, Fetch, NodeOutcome
from tests.support.paper_slurm import PaperSlurm, engine_on, order
from tests.unit.engines.test_desk_terms import ORDER, fetch, told

LOST = NodeOutcome(attempt_id="att_1", epoch=1, node="n1", kind=EndKind.LOST, ended_at=1.0)
NEXT = msgspec.structs.replace(ORDER, incarnation=3)


def heir(process: str, after: int = 0) -> Fetch:
    return msgspec.structs.replace(fetch(process), after=after)


@pytest.fixture
def lost(tmp_path: Path, clock: VirtualClock) -> Desk:
    """Whose one share was lost, and whose keeper said that it stays."""
    made = Desk(tmp_path, clock)
    made.add((ORDER,), None)
    made.take(fetch("one"))
    made.hear(msgspec.structs.replace(told("one"), outcome=LOST, will_follow=True), b"")
    return made


def test_nothing_follows_until_the_share_is_begun_anew(lost: Desk) -> None:
    with pytest.raises(NotFound):
        lost.take(heir("heir"))
    lost.begin_anew(NEXT, None)
    share = lost.take(heir("heir"))
    assert (share.order, share.launch) == (NEXT, 0)
    assert lost.take(heir("heir")).order == NEXT, "its answer may not have been heard"


def test_who_comes_second_has_nothing_whichever_way_it_came(lost: Desk) -> None:
    lost.begin_anew(NEXT, None)
    lost.take(heir("heir"))
    with pytest.raises(StateError, match="given to another"):
        lost.take(fetch("started by the cluster", incarnation=3))


def test_the_cluster_knows_it_by_the_job_that_its_keeper_was_started_in(lost: Desk, tmp_path: Path) -> None:
    lost.begin_anew(NEXT, None)
    lost.take(heir("heir"))
    assert Desk(tmp_path, VirtualClock()).find("att_1")["n1"].launch == 0
    again = msgspec.structs.replace(told("heir"), incarnation=3)
    lost.hear(msgspec.structs.replace(again, outcome=msgspec.structs.replace(LOST, incarnation=3)), b"")
    lost.begin_anew(msgspec.structs.replace(ORDER, incarnation=4), None)
    assert lost.take(heir("heir of an heir", after=3)).launch == 0


class Started(PaperSlurm):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def submit(self, request: Request, account: Account | None = None) -> str:
        self.names.append(request.name)
        return "1"


@pytest.mark.anyio
async def test_slurm_is_asked_for_another_keeper_only_if_nobody_came(
    tmp_path: Path, clock: VirtualClock
) -> None:
    slurm = Started()
    engine = engine_on(tmp_path, clock, slurm)
    first = order(nodes=("n0",), project="default", gpu_ids=())
    engine.desk.add((first,), None)
    engine.desk.take(msgspec.structs.replace(fetch("one"), node="n0"))
    end = msgspec.structs.replace(LOST, node="n0", epoch=first.epoch)
    said = msgspec.structs.replace(told("one"), node="n0", epoch=first.epoch, outcome=end, will_follow=True)
    engine.desk.hear(said, b"")
    again = msgspec.structs.replace(first, incarnation=1)
    asked = Submission(attempt_id="att_1", epoch=1, orders=(again,), ticket="t")
    engine.desk.begin_anew(again, None)
    await engine.submit(asked)
    assert slurm.names == []
    clock.advance(HEIR_S + 1.0)
    await engine.submit(asked)
    assert slurm.names == ["train.default-7.shoal-att_1.1"]
