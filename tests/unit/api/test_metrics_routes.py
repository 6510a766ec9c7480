"""A job's metrics over HTTP: their owner, the number of points, and hostile names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.curve import Axis, Samples, single_point
from tests.support.planes.world import ApiWorld, open_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiWorld]:
    with open_world(tmp_path_factory.mktemp("metrics")) as opened:
        job_id = opened.jobs["vision"]
        samples = [
            Samples(
                name="loss",
                axis=Axis.STEP,
                points=tuple(single_point(step, 1.0 / (step + 1)) for step in range(100)),
                rank=0,
            ),
            Samples(name="cpus_used", axis=Axis.TIME, points=(single_point(1_000, float("nan")),)),
        ]
        store = opened.plane.core.records.store
        opened.portal.call(lambda: store.write(lambda tx: tx.metrics.add(job_id, 1, "node-1", samples, 5.0)))
        yield opened


def test_curves_come_with_their_extremes_and_no_more_points_than_asked_for(world: ApiWorld) -> None:
    metrics = world.call("GET", f"/v1/jobs/{world.jobs['vision']}/metrics?points=10", role="viewer").json()
    node, loss = metrics["items"]
    assert (node["name"], node["node"], node["axis"], node["points"]) == (
        "cpus_used",
        "node-1",
        "time",
        [[1000, None, None, None]],
    )
    assert (loss["name"], loss["node"], loss["rank"], loss["high"], loss["low"]) == (
        "loss",
        None,
        0,
        1.0,
        0.01,
    )
    assert len(loss["points"]) <= 10
    assert loss["points"][-1][:2] == loss["newest"] == [99, 0.01]


def test_names_select(world: ApiWorld) -> None:
    path = f"/v1/jobs/{world.jobs['vision']}/metrics?name=loss&name=other"
    assert [one["name"] for one in world.call("GET", path, role="viewer").json()["items"]] == ["loss"]


@pytest.mark.parametrize("query", ["points=0", "points=513", "what=1", "name="])
def test_metrics_query_that_makes_no_sense_is_refused(world: ApiWorld, query: str) -> None:
    assert world.call("GET", f"/v1/jobs/{world.jobs['vision']}/metrics?{query}", role="viewer").status == 422


def test_strangers_see_no_metrics(world: ApiWorld) -> None:
    assert world.call("GET", f"/v1/jobs/{world.jobs['vision']}/metrics", role="stranger").status == 404
