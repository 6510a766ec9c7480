"""A node agent whose task was lost beside others is still there: it has the order of the task in its
place."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.engines.base import Submission
from shoal.engines.fake import VirtualClock
from shoal.engines.remote.mailbox import SUCCESSOR_S, Mailbox
from shoal.engines.slurm.render import SlurmJobRequest
from shoal.engines.slurm.shared_files import UnixAccount
from shoal.errors import NotFound, StateError
from shoal.wire import EndKind, TaskOutcome, TaskSpecRequest
from tests.support.runtime.task_specs import change_task_spec
from tests.support.slurm.fake_slurm import FakeSlurm, engine_on, slurm_task_spec
from tests.unit.engines.remote.test_mailbox_terms import ORDER, fetch, told

LOST = TaskOutcome(attempt_id="att_1", epoch=1, node="n1", kind=EndKind.LOST, ended_at=1.0)
NEXT = change_task_spec(ORDER, replacement=3)


def heir(process: str, after: int = 0) -> TaskSpecRequest:
    return msgspec.structs.replace(fetch(process), previous_replacement=after)


@pytest.fixture
def lost(tmp_path: Path, clock: VirtualClock) -> Mailbox:
    """Whose one task was lost, and whose node agent said that it stays."""
    mailbox = Mailbox(tmp_path, clock)
    mailbox.add((ORDER,), None)
    mailbox.assign(fetch("one"))
    mailbox.receive(msgspec.structs.replace(told("one"), outcome=LOST, will_replace=True), b"")
    return mailbox


def test_successor_gets_nothing_before_the_replacement_exists(lost: Mailbox) -> None:
    with pytest.raises(NotFound):
        lost.assign(heir("heir"))
    lost.replace(NEXT, None)
    task = lost.assign(heir("heir"))
    assert (task.task_spec, task.launch_replacement) == (NEXT, 0)
    assert lost.assign(heir("heir")).task_spec == NEXT, "its answer may not have been heard"


def test_second_process_gets_no_task_spec(lost: Mailbox) -> None:
    lost.replace(NEXT, None)
    lost.assign(heir("heir"))
    with pytest.raises(StateError, match="given to another"):
        lost.assign(fetch("started by the cluster", replacement=3))


def test_replacement_keeps_the_cluster_job_of_its_node_agent(lost: Mailbox, tmp_path: Path) -> None:
    lost.replace(NEXT, None)
    lost.assign(heir("heir"))
    assert Mailbox(tmp_path, VirtualClock()).find("att_1")["n1"].launch_replacement == 0
    again = msgspec.structs.replace(told("heir"), replacement=3)
    lost.receive(msgspec.structs.replace(again, outcome=msgspec.structs.replace(LOST, replacement=3)), b"")
    lost.replace(change_task_spec(ORDER, replacement=4), None)
    assert lost.assign(heir("heir of an heir", after=3)).launch_replacement == 0


class Started(FakeSlurm):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def submit(self, request: SlurmJobRequest, account: UnixAccount | None = None) -> str:
        self.names.append(request.name)
        return "1"


@pytest.mark.anyio
async def test_slurm_starts_another_node_agent_only_if_none_came(tmp_path: Path, clock: VirtualClock) -> None:
    slurm = Started()
    engine = engine_on(tmp_path, clock, slurm)
    first = slurm_task_spec(nodes=("n0",), project="default", gpu_ids=())
    engine.mailbox.add((first,), None)
    engine.mailbox.assign(msgspec.structs.replace(fetch("one"), node="n0"))
    end = msgspec.structs.replace(LOST, node="n0", epoch=first.identity.epoch)
    changed = msgspec.structs.replace(
        told("one"), node="n0", epoch=first.identity.epoch, outcome=end, will_replace=True
    )
    engine.mailbox.receive(changed, b"")
    again = change_task_spec(first, replacement=1)
    requested = Submission(attempt_id="att_1", epoch=1, task_specs=(again,), bootstrap_token="t")
    engine.mailbox.replace(again, None)
    await engine.submit(requested)
    assert slurm.names == []
    clock.advance(SUCCESSOR_S + 1.0)
    await engine.submit(requested)
    assert slurm.names == ["train.default-7.shoal-att_1.1"]
