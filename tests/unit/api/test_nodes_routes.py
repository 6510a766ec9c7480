"""What `GET /v1/nodes` says of a node beside what its cluster says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shoal.api.routes import nodes
from shoal.control.leases import QUIET_S
from tests.support.lab import Lab, now


def test_jobs_that_are_silent_on_a_node_are_named_though_the_cluster_has_not_noticed() -> None:
    lab = Lab(num_nodes=2)
    job = lab.running(resources={"nodes": 2, "cpus": 1})
    call: Any = SimpleNamespace(plane=lab.plane, visible=lambda: None)

    def silent() -> list[list[str]]:
        return [node["silent_jobs"] for node in now(nodes._views(call))]

    assert silent() == [[], []]
    lab.cluster.cut("n1")
    lab.clock.advance(QUIET_S + 1)
    lab.watch()
    assert silent() == [[job.reference], []], "as `shoal why` says it"
    assert [node["is_alive"] for node in now(nodes._views(call))] == [True, True]
    stranger: Any = SimpleNamespace(plane=lab.plane, visible=lambda: ())
    assert now(nodes._views(stranger, "n1"))[0]["silent_jobs"] == []


def test_a_job_that_was_never_handed_over_is_silent_on_no_node() -> None:
    lab = Lab(num_nodes=1)
    lab.heal()
    job = lab.submit()
    lab.engine.lose_all()
    lab.turn()
    lab.clock.advance(QUIET_S + 1)
    lab.turn()
    call: Any = SimpleNamespace(plane=lab.plane, visible=lambda: None)
    assert lab.core.leases.silent_nodes(lab.attempt(job), QUIET_S) == ("n1",)
    assert now(nodes._views(call))[0]["silent_jobs"] == [], "nobody there has heard of it"
