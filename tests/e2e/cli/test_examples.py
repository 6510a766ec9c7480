"""Every example does what its first lines say, on a real cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from shoal.spec.files import load_service
from tests.style.tree import ROOT
from tests.support.planes.simulated import SimulatedCluster, running_cluster
from tests.support.runtime.torchrun import needs_torch

TESTED = {"array", "callbacks", "data_parallel", "language_model", "vllm"}
"""`callbacks` and `language_model` have their own tests; `vllm` needs a GPU, so only its spec is tested."""


@pytest.fixture(scope="module")
def shoal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedCluster]:
    with running_cluster(tmp_path_factory.mktemp("home"), "--demo", "2x2") as cluster:
        yield cluster


def test_every_example_is_run_by_a_test() -> None:
    assert {path.parent.name for path in (ROOT / "examples").glob("*/*.yaml")} == TESTED


@needs_torch
@pytest.mark.slow
def test_data_parallel_trains_on_two_nodes_and_goes_on_from_its_checkpoint(shoal: SimulatedCluster) -> None:
    flags = ("--gpus", "2", "--ranks-per-node", "1", "-e", "STEPS=13", "-e", "STEP_S=0")
    output = shoal("run", *flags, "examples/data_parallel/job.yaml")
    assert sorted(re.findall(r"rank (\d) of 2 starts after step 0", output)) == ["0", "1"]
    losses = [float(loss) for loss in re.findall(r"\[0\] step +\d+ of 13  loss ([0-9.]+)", output)]
    assert len(losses) == 13
    assert losses[-1] < losses[0]
    assert shoal.jobs("data-parallel")[0]["nodes"] == ["sim-01", "sim-02"]
    shoal("retry", "data-parallel")
    again = shoal("logs", "-f", "data-parallel")
    assert len(re.findall(r"rank \d of 2 starts after step 13", again)) == 2
    assert len(shoal.jobs("data-parallel")) == 1


@pytest.mark.parametrize(("name", "nodes", "fewest"), [("service", 1, 0), ("two_nodes", 2, 1)])
def test_specs_for_vllm_are_services(name: str, nodes: int, fewest: int) -> None:
    spec = load_service(ROOT / "examples" / "vllm" / f"{name}.yaml")
    assert (spec.readiness.path, spec.balance, spec.network) == ("/health", "tokens", "closed")
    assert (spec.resources.nodes.max, spec.replicas.min) == (nodes, fewest)


def test_array_tries_every_learning_rate(shoal: SimulatedCluster) -> None:
    shoal("run", "-e", "PAUSE_S=0", "examples/array/job.yaml")
    jobs = shoal.jobs("sweep")
    assert [job["status"] for job in jobs] == ["succeeded"] * 8
    outputs = [shoal("logs", job["job_id"]) for job in jobs]
    rates = {re.match(r"\[0\] rate ([0-9.]+) +loss after 200 steps \S+\n$", text) for text in outputs}
    assert len({match[1] for match in rates if match}) == 8, outputs
