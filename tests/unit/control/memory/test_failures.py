"""Whether the ranks of several nodes restart in place, by the reports of all nodes."""

from __future__ import annotations

import signal
from typing import Any

import anyio
import pytest

from shoal.control.memory import supervisor_reports
from shoal.engines.fake import Act, always
from shoal.model.job import Job
from shoal.wire import MAX_EARLY_ENDS, EndKind, Renewal, TaskOutcome, TaskPhase
from tests.support.planes.bench import ControlPlaneLab


@pytest.fixture
def lab() -> ControlPlaneLab:
    return ControlPlaneLab(script=always(Act(claim_s=1000.0, stop_s=1000.0)))


async def a_gang(lab: ControlPlaneLab) -> Job:
    job = lab.running_job(resources={"nodes": 2, "cpus": 1}, retry={"max": 5})
    for node in ("n1", "n2"):
        await lab.plane.renew(message(lab, job, node, started_at=1.0))
    return job


def message(lab: ControlPlaneLab, job: Job, node: str, **fields: Any) -> Renewal:
    attempt = lab.attempt(job)
    values: dict[str, Any] = {"attempt_id": attempt.attempt_id, "epoch": attempt.epoch, "node": node}
    return Renewal(
        **{"phase": TaskPhase.RUNNING, "rendezvous_round": attempt.rendezvous_round, **values, **fields}
    )


def failed(lab: ControlPlaneLab, job: Job, node: str, **fields: Any) -> Renewal:
    attempt = lab.attempt(job)
    ended: dict[str, Any] = {"kind": EndKind.EXITED, "ended_at": lab.clock.now(), "exit_code": 1, **fields}
    failure = TaskOutcome(attempt_id=attempt.attempt_id, epoch=attempt.epoch, node=node, **ended)
    return message(lab, job, node, failure=failure)


async def answers(lab: ControlPlaneLab, *renewals: Renewal) -> list[int]:
    """Return the rendezvous round in the reply to each of these renewals, sent at the same time."""
    rounds = [0] * len(renewals)

    async def ask(at: int, renewal: Renewal) -> None:
        rounds[at] = (await lab.plane.renew(renewal)).rendezvous_round

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            for at, renewal in enumerate(renewals):
                tasks.start_soon(ask, at, renewal)
    return rounds


async def test_program_that_gives_up_on_every_node_is_not_started_again_in_place(
    lab: ControlPlaneLab,
) -> None:
    job = await a_gang(lab)
    renewals = [failed(lab, job, node, gives_up=True, num_early=1) for node in ("n1", "n2")]
    assert await answers(lab, *renewals) == [0, 0]
    assert lab.attempt(job).restarts == 0


async def test_program_that_gives_up_on_one_node_is_not_restarted_without_reports_of_the_others(
    lab: ControlPlaneLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_reports, "OTHERS_S", 0.01)
    job = await a_gang(lab)
    assert await answers(lab, failed(lab, job, "n1", gives_up=True, num_early=1)) == [0]


@pytest.mark.parametrize("is_killed_first", [True, False])
async def test_ranks_that_exit_because_one_was_killed_elsewhere_are_started_again(
    lab: ControlPlaneLab, *, is_killed_first: bool
) -> None:
    job = await a_gang(lab)
    exited = failed(lab, job, "n1", gives_up=True, num_early=1)
    killed = failed(lab, job, "n2", kind=EndKind.SIGNALED, signal=signal.SIGKILL, exit_code=None, num_early=1)
    renewals = (killed, exited) if is_killed_first else (exited, killed)
    assert await answers(lab, *renewals) == [1, 1]
    assert lab.attempt(job).restarts == 1, "both tell of one failure"


async def test_ranks_that_are_killed_at_once_again_and_again_are_given_up(lab: ControlPlaneLab) -> None:
    """On either node: each counts the rounds, whichever node failed."""
    job = await a_gang(lab)
    killed: dict[str, Any] = {"kind": EndKind.SIGNALED, "signal": signal.SIGKILL, "exit_code": None}
    assert await answers(lab, failed(lab, job, "n1", num_early=MAX_EARLY_ENDS, **killed)) == [1]
    assert await answers(lab, failed(lab, job, "n2", num_early=MAX_EARLY_ENDS + 1, **killed)) == [1]
