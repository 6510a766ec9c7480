"""`GET /v1/nodes` shows more of a node than its cluster reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shoal.api.routes import nodes
from shoal.control.memory.leases import QUIET_S
from tests.support.planes.bench import ControlPlaneLab, result_of


def test_jobs_that_are_silent_on_a_node_are_named_before_the_cluster_notices() -> None:
    lab = ControlPlaneLab(num_nodes=2)
    job = lab.running_job(resources={"nodes": 2, "cpus": 1})
    call: Any = SimpleNamespace(core=lab.core, visible=lambda: None)

    def silent() -> list[list[str]]:
        return [node["silent_jobs"] for node in result_of(nodes._node_views(call))]

    assert silent() == [[], []]
    lab.cluster.cut("n1")
    lab.clock.advance(QUIET_S + 1)
    lab.watch()
    assert silent() == [[job.reference], []], "as `shoal why` says it"
    assert [node["is_alive"] for node in result_of(nodes._node_views(call))] == [True, True]
    stranger: Any = SimpleNamespace(core=lab.core, visible=lambda: ())
    assert result_of(nodes._node_views(stranger, "n1"))[0]["silent_jobs"] == []


def test_a_job_that_was_never_handed_over_is_silent_on_no_node() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    lab.heal()
    job = lab.submit()
    lab.engine.lose_cluster()
    lab.run_loops()
    lab.clock.advance(QUIET_S + 1)
    lab.run_loops()
    call: Any = SimpleNamespace(core=lab.core, visible=lambda: None)
    assert lab.core.running.leases.silent_nodes(lab.attempt(job), QUIET_S) == ("n1",)
    assert result_of(nodes._node_views(call))[0]["silent_jobs"] == [], "no process there knows it"
