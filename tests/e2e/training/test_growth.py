"""A job that may use more nodes starts on what is free, and goes on with more when they fall idle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.planes.real import RankGate, RealPlane, open_gate, running_plane, until

pytestmark = pytest.mark.slow
SAVES = 'echo step > "$SHOAL_CHECKPOINT_DIR/last"; '
MOST_S = 100.0
"""A file counts as a checkpoint when it was left alone for 20 s, is looked for every 20 s, and told of with
the next renewal; idle nodes are looked at every 30 s."""


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[RealPlane]:
    policy = tmp_path / "policy.yaml"
    policy.write_text("grow_gain: 0\n", encoding="utf-8")
    with running_plane(tmp_path / "home", "--policy", str(policy)) as real:
        yield real


@pytest.mark.soak
def test_elastic_job_starts_small_and_goes_on_with_the_nodes_that_fall_idle(
    plane: RealPlane, gate: RankGate
) -> None:
    with open_gate() as others:
        first = plane.submit(others.run_line(), resources={"nodes": 1, "gpus": 2})
        others.wait_for_ranks()
        asked = {"nodes": "1..2", "gpus": 2}
        elastic = plane.submit(gate.run_line(before=SAVES), resources=asked, checkpoint={})
        gate.wait_for_ranks()
        assert "no other node is idle" in elastic.why()["sentence"]
        others.open()
    plane.until_status(first, "succeeded")
    until(lambda: len(plane.attempts(elastic)) == 2, "it is stopped to go on with more", MOST_S)
    gate.wait_for_ranks(2)
    small, grown = plane.attempts(plane.until_status(elastic, "running"))
    assert (len(small["nodes"]), small["reason"], len(grown["nodes"])) == (1, "preempted", 2)
    assert "stopped to go on with 2 nodes instead of 1" in small["message"]
    gate.open()
    plane.until_status(elastic, "succeeded")
