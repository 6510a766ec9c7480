"""Whether the ranks of several nodes are started again in place, by what all of the nodes report."""

from __future__ import annotations

import signal
from typing import Any

import anyio
import pytest

from shoal.control import failures
from shoal.engines.fake import Act, always
from shoal.model.job import Job
from shoal.wire import MAX_EARLY, EndKind, NodeOutcome, Phase, Renewal
from tests.support.lab import Lab


@pytest.fixture
def lab() -> Lab:
    return Lab(script=always(Act(claim_s=1000.0, stop_s=1000.0)))


async def a_gang(lab: Lab) -> Job:
    job = lab.running(resources={"nodes": 2, "cpus": 1}, retry={"max": 5})
    for node in ("n1", "n2"):
        await lab.plane.renew(message(lab, job, node, started_at=1.0))
    return job


def message(lab: Lab, job: Job, node: str, **fields: Any) -> Renewal:
    attempt = lab.attempt(job)
    values: dict[str, Any] = {"attempt_id": attempt.attempt_id, "epoch": attempt.epoch, "node": node}
    return Renewal(**{"phase": Phase.RUNNING, "generation": attempt.generation, **values, **fields})


def failed(lab: Lab, job: Job, node: str, **fields: Any) -> Renewal:
    attempt = lab.attempt(job)
    ended: dict[str, Any] = {"kind": EndKind.EXITED, "ended_at": lab.clock.now(), "exit_code": 1, **fields}
    failure = NodeOutcome(attempt_id=attempt.attempt_id, epoch=attempt.epoch, node=node, **ended)
    return message(lab, job, node, failure=failure)


async def answers(lab: Lab, *told: Renewal) -> list[int]:
    """The group of ranks that each of these supervisors is told of; all of them ask at once."""
    heard = [0] * len(told)

    async def ask(at: int, one: Renewal) -> None:
        heard[at] = (await lab.plane.renew(one)).generation

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            for at, one in enumerate(told):
                tasks.start_soon(ask, at, one)
    return heard


async def test_program_that_gives_up_on_every_node_is_not_started_again_in_place(lab: Lab) -> None:
    job = await a_gang(lab)
    told = [failed(lab, job, node, gives_up=True, num_early=1) for node in ("n1", "n2")]
    assert await answers(lab, *told) == [0, 0]
    assert lab.attempt(job).restarts == 0


async def test_program_that_gives_up_on_one_node_is_not_started_again_for_want_of_word_of_the_others(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "OTHERS_S", 0.01)
    job = await a_gang(lab)
    assert await answers(lab, failed(lab, job, "n1", gives_up=True, num_early=1)) == [0]


@pytest.mark.parametrize("is_killed_first", [True, False])
async def test_ranks_that_exit_because_one_was_killed_elsewhere_are_started_again(
    lab: Lab, *, is_killed_first: bool
) -> None:
    job = await a_gang(lab)
    exited = failed(lab, job, "n1", gives_up=True, num_early=1)
    killed = failed(lab, job, "n2", kind=EndKind.SIGNALED, signal=signal.SIGKILL, exit_code=None, num_early=1)
    told = (killed, exited) if is_killed_first else (exited, killed)
    assert await answers(lab, *told) == [1, 1]
    assert lab.attempt(job).restarts == 1, "both tell of one failure"


async def test_ranks_that_are_killed_at_once_again_and_again_are_given_up(lab: Lab) -> None:
    """On either node: each counts the groups, whoever failed."""
    job = await a_gang(lab)
    killed: dict[str, Any] = {"kind": EndKind.SIGNALED, "signal": signal.SIGKILL, "exit_code": None}
    assert await answers(lab, failed(lab, job, "n1", num_early=MAX_EARLY, **killed)) == [1]
    assert await answers(lab, failed(lab, job, "n2", num_early=MAX_EARLY + 1, **killed)) == [1]
