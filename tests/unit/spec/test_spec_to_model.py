"""From a spec to the values that the scheduler and the supervisor get."""

from __future__ import annotations

import re
from typing import Any

import pytest

from shoal.errors import SpecError
from shoal.model.from_spec import log_rules_of, mounts_of, request_of, retry_of
from shoal.model.job import GpuRequest, ResourceRequest, RetryPolicy, TopologyRequest
from shoal.spec import parse_job
from shoal.spec.launchers import launcher_request
from shoal.wire import LogRule, Mount, RuleAction


def request(**fields: Any) -> ResourceRequest:
    return request_of(parse_job({"run": "x", **fields}))


def test_a_job_that_asks_for_nothing_gets_one_cpu_on_one_node() -> None:
    assert request() == ResourceRequest()


def test_one_rank_for_each_gpu_and_one_cpu_for_each_rank() -> None:
    resources = request(resources={"gpus": "H100:8"})
    assert resources.gpus == GpuRequest(count=8, kind="H100")
    assert (resources.ranks_per_node, resources.cpus) == (8, 8.0)
    assert request(ranks_per_node=4).cpus == 4.0


def test_explicit_cpus_and_memory_win_over_defaults_from_gpus() -> None:
    resources = request(
        resources={"gpus": 8, "cpus": "64+", "memory": "1GB..2GB", "disk": "1TB"}, ranks_per_node=1
    )
    assert (resources.cpus, resources.memory_bytes, resources.disk_bytes, resources.ranks_per_node) == (
        64.0,
        10**9,
        10**12,
        1,
    )


def test_nodes_keep_both_ends_and_topology_its_mode() -> None:
    resources = request(resources={"nodes": "2..4"}, topology="rack:preferred", time_limit="1h")
    assert (resources.min_nodes, resources.max_nodes, resources.time_limit_s) == (2, 4, 3600.0)
    assert resources.topology == TopologyRequest(within="rack", is_required=False)
    assert request(topology="rack").topology == TopologyRequest(within="rack", is_required=True)


def test_the_default_retry_policy_is_the_same_in_spec_and_model() -> None:
    assert retry_of(parse_job({"run": "x"})) == RetryPolicy()
    spec = parse_job({"run": "x", "retry": {"max": 2, "on": "oom", "backoff": "1m"}})
    assert retry_of(spec) == RetryPolicy(max_retries=2, on=frozenset({"oom"}), backoff_s=60.0)


def test_mounts_and_log_rules_become_wire_values() -> None:
    spec = parse_job({"run": "x", "mounts": ["/a:/b:ro"], "log_rules": {"Xid": "stop_retries"}})
    assert mounts_of(spec) == (Mount(source="/a", target="/b", is_read_only=True),)
    assert log_rules_of(spec) == (LogRule(match="Xid", action=RuleAction.STOP_RETRIES),)


@pytest.mark.parametrize(
    ("run", "ranks"),
    [
        ("torchrun --standalone --nproc-per-node 4 train.py", 4),
        ("OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 train.py", 2),
        ("torchrun --nproc-per-node auto train.py", 1),
        ("torchrun --nproc-per-node auto --rdzv-id 4 train.py --nproc-per-node 4", 1),
        ("torchrun \\\n  --nproc-per-node=4 \\\n  train.py", 4),
        ("srun /my/env/bin/torchrun --nproc-per-node '4' train.py", 4),
        ("accelerate launch --num_processes 4 train.py", 4),
        ("torchrun --nproc-per-node 2 a.py && torchrun --nproc-per-node 4 b.py", 1),
        ("torchrun --nproc-per-node 99999 train.py", 1),
        ("echo --nproc-per-node 4", 1),
        ("python train.py  # torchrun --nproc-per-node 4", 1),
        ("torchrun --nproc_per 4 train.py", 4),
        ("torchrun -m --nproc_per 4 pkg.train --nproc-per-node 2", 4),
        ("PET_NPROC_PER_NODE=4 torchrun train.py", 4),
        ("PET_NPROC_PER_NODE=4 torchrun --nproc-per-node 2 train.py", 2),
        ("PET_NPROC_PER_NODE=4 python train.py", 1),
        ("torchrun --standalone tool --nproc-per-node 4", 1),
        ("torchrun --nproc-per-node 2 tool --nproc-per-node 4", 2),
        ("python -mtorch.distributed.run --nproc-per-node 4 train.py", 4),
        ("python -um torch.distributed.run --nproc-per-node 4 train.py", 4),
        ("ds --num_accel 4 train.py", 4),
        ("python -m accelerate.commands.accelerate_cli launch --num_processes 4 train.py", 4),
        ("accelerate test --num_processes 4", 1),
    ],
)
def test_processes_that_a_torchrun_asks_for_are_the_ranks_of_the_node(run: str, ranks: int) -> None:
    assert request(run=run).ranks_per_node == ranks
    assert request(run=run, ranks_per_node=1).ranks_per_node == 1
    assert request(run=run, ranks_per_node=ranks).ranks_per_node == ranks


@pytest.mark.parametrize(
    ("run", "job_nodes", "nodes", "ranks"),
    [
        ("torchrun --nnodes 2 --nproc-per-node 2 p.py", None, (2, 2), 2),
        ("torchrun --nnodes=2 p.py", 2, (2, 2), 1),
        ("PET_NNODES='2' torchrun --nproc_per=2 p.py", None, (2, 2), 2),
        ("torchrun --nnodes=1:4 p.py", None, (1, 1), 1),
        ("torchrun --nnodes=2:4 p.py", None, (2, 4), 1),
        ("torchrun --nnodes=1:4 p.py", "2..8", (2, 4), 1),
        ("torchrun --nnodes=$SLURM_NNODES p.py", 3, (3, 3), 1),
        ("torchrun p.py --num_nodes 8", None, (1, 1), 1),
        ("accelerate launch --num_machines 2 --num_processes 8 p.py", None, (2, 2), 4),
        ("accelerate launch --num_processes 8 p.py", 2, (2, 2), 4),
        ("deepspeed --num_nodes 2 --num_gpus 8 p.py", None, (2, 2), 8),
        ("bash prepare.sh; torchrun --nnodes 2 p.py", None, (2, 2), 1),
    ],
)
def test_nodes_that_a_launcher_asks_for_are_those_of_the_job(
    run: str, job_nodes: object, nodes: tuple[int, int], ranks: int
) -> None:
    resources = request(run=run, resources={} if job_nodes is None else {"nodes": job_nodes})
    assert (resources.min_nodes, resources.max_nodes, resources.ranks_per_node) == (*nodes, ranks)


@pytest.mark.parametrize(
    ("run", "fields", "because"),
    [
        ("torchrun --nnodes 8 p.py", {"resources": {"nodes": 2}}, "asks for 8 nodes, and `nodes` is 2"),
        ("torchrun --nnodes 2 p.py", {"resources": {"nodes": 1}}, "asks for 2 nodes, and `nodes` is 1"),
        ("torchrun --nnodes 1 p.py", {"resources": {"nodes": "2..4"}}, "1 nodes, and `nodes` is 2..4"),
        ("torchrun --nnodes 4:2 p.py", {}, "asks for 4..2 nodes"),
        ("torchrun --nnodes 999999 p.py", {}, "a job may have"),
        ("torchrun --nproc-per-node 4 p.py", {"ranks_per_node": 2}, "and `ranks_per_node` is 2"),
    ],
)
def test_launcher_that_contradicts_its_job_is_refused(run: str, fields: dict[str, Any], because: str) -> None:
    with pytest.raises(SpecError, match=re.escape(because)):
        request(run=run, **fields)


@pytest.mark.parametrize("text", ["torchrun ", "mpirun -;", "-a;mpirun ", "mpirun -a "])
def test_script_of_the_largest_size_is_read_quickly(text: str) -> None:
    launch = launcher_request(text * (28 << 10))
    assert (launch.per_node, launch.mpi_in_all) == (None, None)


@pytest.mark.parametrize(
    ("run", "nodes", "ranks"),
    [
        ("mpirun -n 4 python train.py", 2, 2),
        ("mpiexec --allow-run-as-root -np 6 ./solver -n 2", 2, 3),
        ("mpirun -n 4 ./solver", 1, 1),
        ("mpirun -n 3 ./solver", 2, 1),
        ("mpirun -n 4 ./solver", "1..2", 1),
        ("mpirun ./solver -n 4 x", 2, 1),
        ("mpirun.openmpi \\\n  -n 4 ./solver", 2, 2),
        ("mpirun -np=4 ./solver; mpirun -n 4 ./solver", 2, 2),
        ("mpirun -n 4 ./first; mpirun -n 8 ./second", 2, 1),
        ("# mpirun -n 4 ./solver", 2, 1),
        ("mpirun -n $N ./solver", 2, 1),
    ],
)
def test_processes_that_mpirun_asks_for_are_spread_over_several_nodes(
    run: str, nodes: int | str, ranks: int
) -> None:
    assert request(run=run, resources={"nodes": nodes}).ranks_per_node == ranks
