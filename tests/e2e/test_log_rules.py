"""What a log line says about a node or about trying again is acted upon, in place and by the next attempt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.simulated import Cluster, a_cluster

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
def shoal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with a_cluster(tmp_path_factory.mktemp("home"), "--demo", "2x2") as cluster:
        yield cluster


def events(shoal: Cluster, job: str) -> list[dict[str, Any]]:
    return list(json.loads(shoal("events", "--job", job, "--json")))


def test_node_that_a_line_speaks_of_is_avoided_and_named_to_operators(shoal: Cluster, tmp_path: Path) -> None:
    spec = tmp_path / "ecc.yaml"
    spec.write_text(JOB.replace("NAME", "ecc").replace("LINE", "GPU 3: uncorrectable ECC error"))
    assert "went well" in shoal("run", str(spec))
    told = events(shoal, "ecc")
    kinds = [event["kind"] for event in told]
    assert "attempt.regrouped" not in kinds, "the same node is not tried again in place"
    (suspected,) = [event for event in told if event["kind"] == "node.suspected"]
    placed = [event["data"]["event"] for event in told if event["kind"] == "attempt.placed"]
    first, second = [one["allocation"][0]["node"] for one in placed]
    assert suspected["node"] == first != second


def test_job_that_a_line_says_not_to_try_again_ends_there(shoal: Cluster, tmp_path: Path) -> None:
    spec = tmp_path / "assertion.yaml"
    spec.write_text(JOB.replace("NAME", "assertion").replace("LINE", "assertion failed"))
    shoal("run", "-d", str(spec))
    shoal("logs", "-f", "assertion")
    (job,) = shoal.jobs("assertion")
    assert (job["status"], job["epoch"]) == ("failed", 1)
