"""A gang of which one node finishes before the others: whatever becomes of that node, the others go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shoal.control.memory.leases import FENCE_MARGIN_S, QUIET_S
from shoal.engines.fake import Act
from shoal.model.attempt import EndReason
from shoal.model.job import Job
from shoal.model.node import NodeState
from shoal.model.retry import LONG_LIFE_S
from shoal.wire import TaskSpec
from tests.support.planes.bench import ANA, ControlPlaneLab, result_of
from tests.unit.control.memory.test_fences_and_limits import carry_renewals

FENCE_S = 60.0
LATE_S = 600.0
MANY = {"max": 3, "on": ["exit", "signal"]}


def done_on_n1(retry: dict[str, object] | None) -> tuple[ControlPlaneLab, Job]:
    """Of n1, n2 and n3 the first is finished."""
    lab = ControlPlaneLab(
        num_nodes=4, script=lambda task_spec: Act(run_s=5.0 if task_spec.identity.node == "n1" else LATE_S)
    )
    more = {"retry": retry} if retry else {}
    job = lab.running_job(resources={"nodes": 3, "cpus": 1}, fence=f"{FENCE_S:.0f}s", **more)
    assert lab.attempt(job).node_names == ("n1", "n2", "n3")
    live(lab, 6.0)
    assert lab.attempt(job).nodes_left == ("n2", "n3")
    return lab, job


def live(lab: ControlPlaneLab, seconds: float) -> None:
    """Do everything that happens meanwhile, every few seconds."""
    end = lab.clock.monotonic() + seconds
    while lab.clock.monotonic() < end:
        lab.clock.advance(min(5.0, end - lab.clock.monotonic()))
        carry_renewals(lab)
        lab.run_loops()


def lose(lab: ControlPlaneLab) -> None:
    lab.cluster.power_off("n1")


def cut(lab: ControlPlaneLab) -> None:
    lab.cluster.cut("n1")


def declare_dead(lab: ControlPlaneLab) -> None:
    lab.cluster.cut("n1")
    live(lab, QUIET_S + 1)
    result_of(lab.plane.set_node_state(ANA, "n1", NodeState.DEAD))


def come_back_bare(lab: ControlPlaneLab) -> None:
    lab.cluster.power_off("n1")
    live(lab, QUIET_S + 1)
    lab.cluster.power_on("n1")


def drain(lab: ControlPlaneLab) -> None:
    result_of(lab.plane.set_node_state(ANA, "n1", NodeState.DRAINING))


def vanish(lab: ControlPlaneLab) -> None:
    del lab.cluster.facts["n1"]


def begin_another_plane(lab: ControlPlaneLab) -> None:
    lab.cluster.cut("n1")
    lab.restart()


@pytest.mark.parametrize("retry", [None, MANY])
@pytest.mark.parametrize(
    "happening", [lose, cut, declare_dead, come_back_bare, drain, vanish, begin_another_plane]
)
def test_finished_node_costs_its_gang_nothing(
    happening: Callable[[ControlPlaneLab], None], retry: dict[str, object] | None
) -> None:
    lab, job = done_on_n1(retry)
    happening(lab)
    live(lab, FENCE_S + FENCE_MARGIN_S + QUIET_S)
    attempt = lab.attempt(job)
    assert (lab.status(job), attempt.epoch, attempt.rendezvous_round) == ("running", 1, 0), (
        "not before all have ended"
    )
    assert [node for _, node in lab.running_tasks()] == ["n2", "n3"]
    live(lab, LATE_S)
    assert (lab.status(job), lab.attempt(job).epoch) == ("succeeded", 1)


def test_gang_with_a_finished_node_does_not_succeed_when_another_is_lost() -> None:
    lab, job = done_on_n1(MANY)
    lab.cluster.power_off("n2")
    live(lab, FENCE_S + FENCE_MARGIN_S + QUIET_S)
    assert lab.stored_job(job).outcome is None
    assert lab.attempts(job)[0].reason is not EndReason.SUCCEEDED


def test_finished_node_does_not_make_a_long_run_count_as_short() -> None:
    def script(task_spec: TaskSpec) -> Act:
        return Act(run_s=5.0 if task_spec.identity.node == task_spec.ranks.nodes[0] else 100 * LONG_LIFE_S)

    lab = ControlPlaneLab(num_nodes=5, script=script)
    job = lab.running_job(resources={"nodes": 3, "cpus": 1}, fence=f"{FENCE_S:.0f}s")
    for losses in (1, 2):
        live(lab, LONG_LIFE_S + 60.0)
        lab.cluster.power_off(lab.attempt(job).node_names[1])
        live(lab, FENCE_S + FENCE_MARGIN_S + QUIET_S)
        assert lab.stored_job(job).losses == 1, f"in a row, after {losses}"
        assert lab.attempts(job)[losses - 1].reason is EndReason.LOST
