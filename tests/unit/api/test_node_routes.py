"""Decisions about nodes over HTTP: the reply to the operator."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from shoal.control.loops.node_refresh import refresh_nodes
from shoal.control.memory.leases import Leases
from shoal.engines.fake import FakeEngine
from tests.support.planes.world import open_world


def test_declaring_a_node_dead_lists_its_jobs_even_if_they_are_replaced_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_world(tmp_path) as world:
        core = world.plane.core
        assert isinstance(core.link.engine, FakeEngine)
        core.link.engine.cluster.cut("node-1")
        world.portal.call(refresh_nodes, core.records, core.link)
        target, key = "/v1/nodes/node-1/declare-dead", [("idempotency-key", "k")]
        refused = world.call("POST", target, role="operator", data={})
        assert (refused.status, "may be alive" in refused.json()["detail"]) == (409, True)
        monkeypatch.setattr(Leases, "supervisor_silence_s", lambda *_: inf)
        replies = [world.call("POST", target, role="operator", data={}, headers=key) for _ in range(2)]
        assert [(one.status, one.json()["begin_anew"]) for one in replies] == [
            (200, ["speech/1", "vision/1"])
        ] * 2
