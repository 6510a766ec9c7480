"""Log rules that exclude a node or forbid a retry act in place and on the next attempt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.planes.simulated import SimulatedCluster, running_cluster

JOB = """
name: NAME
resources: {cpus: 1}
run: |
  if [ "$SHOAL_EPOCH" = 1 ]; then sleep 6; echo "LINE"; exit 1; fi
  echo went well
log_rules: {"uncorrectable ECC": exclude_node, "assertion failed": stop_retries}
retry: {max: 3, on: [exit], backoff: 0s}
"""


@pytest.fixture(scope="module")
def shoal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedCluster]:
    with running_cluster(tmp_path_factory.mktemp("home"), "--demo", "2x2") as cluster:
        yield cluster


def events(shoal: SimulatedCluster, job: str) -> list[dict[str, Any]]:
    return list(json.loads(shoal("events", "--job", job, "--json")))


def test_node_excluded_by_a_log_line_is_avoided_and_reported_to_operators(
    shoal: SimulatedCluster, tmp_path: Path
) -> None:
    spec = tmp_path / "ecc.yaml"
    spec.write_text(JOB.replace("NAME", "ecc").replace("LINE", "GPU 3: uncorrectable ECC error"))
    assert "went well" in shoal("run", str(spec))
    event_list = events(shoal, "ecc")
    kinds = [event["kind"] for event in event_list]
    assert "attempt.regrouped" not in kinds, "the same node is not tried again in place"
    (suspected,) = [event for event in event_list if event["kind"] == "node.suspected"]
    placed = [event["data"]["event"] for event in event_list if event["kind"] == "attempt.placed"]
    first, second = [attempt["allocation"][0]["node"] for attempt in placed]
    assert suspected["node"] == first != second


def test_log_line_that_forbids_a_retry_ends_the_job(shoal: SimulatedCluster, tmp_path: Path) -> None:
    spec = tmp_path / "assertion.yaml"
    spec.write_text(JOB.replace("NAME", "assertion").replace("LINE", "assertion failed"))
    shoal("run", "-d", str(spec))
    shoal("logs", "-f", "assertion")
    (job,) = shoal.jobs("assertion")
    assert (job["status"], job["epoch"]) == ("failed", 1)
