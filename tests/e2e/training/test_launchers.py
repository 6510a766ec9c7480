"""Programs as people bring them: each kind of launcher in `run`, and what its ranks find."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.wire import EndKind, TaskSpec, World
from tests.support.runtime.tasks import RunningTask, StartTask, a_task_spec
from tests.support.runtime.torchrun import needs_torch

MPI = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no MPI: apt-get install openmpi-bin")
PROGRAM = """
import json, os, sys
print("found", json.dumps({"argv": sys.argv[1:], **os.environ}), flush=True)
"""


def unused_port() -> int:
    """Other tests of this file run beside this one, and each job meets at a port of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def order(run: str, **changes: object) -> TaskSpec:
    values: dict[str, object] = {
        "setup": f"mkdir pkg; tee train.py pkg/train.py <<'END' >/dev/null\n{PROGRAM}\nEND",
        "run": run,
        "ranks_per_node": 2,
        "master_port": unused_port(),
    }
    return a_task_spec(**{**values, **changes})


def found_by(share: RunningTask) -> list[dict[str, Any]]:
    """What each rank found, in rank order."""
    assert share.run().kind is EndKind.SUCCEEDED, share.describe()
    told = [json.loads(text.removeprefix("found ")) for text in share.texts() if text.startswith("found ")]
    return sorted(told, key=lambda found: int(found["RANK"]))


@pytest.mark.parametrize(
    ("run", "argv"),
    [
        ("python train.py --lr 1", ["--lr", "1"]),
        ("torchrun --standalone --nproc-per-node 2 train.py --lr 1", ["--lr", "1"]),
        ("python -m torch.distributed.run --nproc-per-node=2 -m pkg.train --lr 1", ["--lr", "1"]),
        ("python -m torch.distributed.launch --nproc_per_node 2 train.py", ["--local-rank=LOCAL"]),
        ("accelerate launch --num_processes 2 train.py --lr 1", ["--lr", "1"]),
        ("deepspeed --num_gpus 2 train.py --lr 1", ["--local_rank=LOCAL", "--lr", "1"]),
        pytest.param("mpirun -np 2 --bind-to none -x LR=1 python train.py --lr 1", ["--lr", "1"], marks=MPI),
        pytest.param("mpiexec -n 2 python -m pkg.train", [], marks=MPI),
    ],
)
def test_every_launcher_gives_one_program_for_each_rank(start: StartTask, run: str, argv: list[str]) -> None:
    found = found_by(start(order(run)))
    assert [one["RANK"] for one in found] == ["0", "1"]
    for number, one in enumerate(found):
        assert one["argv"] == [word.replace("LOCAL", str(number)) for word in argv]
        assert ("LR" in one) is ("-x LR=1" in run)


def test_program_of_any_framework_reads_its_place_from_the_environment(start: StartTask) -> None:
    """Megatron and DeepSpeed read torchrun's names, JAX its address and Slurm's, others MPI's."""
    found = found_by(start(order("python train.py", master_port=29612)))
    for number, one in enumerate(found):
        names = ("RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
        assert {one[name] for name in (*names, "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")} == {str(number)}
        sizes = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", "LOCAL_SIZE")
        assert {one[name] for name in sizes} == {"2"}
        assert (one["MASTER_ADDR"], one["MASTER_PORT"]) == ("127.0.0.1", "29612")
        assert jax_would_find(one) == ("127.0.0.1:29612", 2, number)


def jax_would_find(environment: dict[str, str]) -> tuple[str, int, int]:
    """As `jax.distributed.initialize()` without arguments: its own variable, and Slurm's if all are there."""
    assert "OMPI_MCA_orte_hnp_uri" not in environment, "JAX would take us for Open MPI's daemon"
    assert int(environment["OMPI_VERSION"].partition(".")[0]) < 5, "JAX would call MPI"
    assert {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_LOCALID"} <= set(environment)
    count, number = int(environment["SLURM_NTASKS"]), int(environment["SLURM_PROCID"])
    return environment["JAX_COORDINATOR_ADDRESS"], count, number


@pytest.mark.parametrize(
    "run",
    [
        "mpirun -n 4 python train.py",
        "accelerate launch --num_processes=4 train.py",
        "python -m torch.distributed.run --nproc-per-node 4 train.py",
    ],
)
def test_launcher_that_wants_other_ranks_says_what_to_write(start: StartTask, run: str) -> None:
    share = start(order(run))
    assert share.run().exit_code == 2
    assert any("set `ranks_per_node: 4` in the job" in line for line in share.texts("e"))


def test_real_mpirun_runs_where_the_job_leaves_the_processes_to_it(start: StartTask) -> None:
    stub = "#!/bin/sh\necho real $@ [$OMPI_COMM_WORLD_SIZE$SLURM_JOB_ID]"
    setup = f"mkdir bin; cat > bin/mpirun <<'END'\n{stub}\nEND\nchmod +x bin/mpirun"
    run = 'PATH="${PATH%%:*}:$PWD/bin:$PATH" mpirun -n 4 ./solver'  # behind ours, before the machine's
    share = start(order(run, ranks_per_node=1, setup=setup))
    assert share.run().kind is EndKind.SUCCEEDED, share.describe()
    assert share.texts() == ["real -n 4 ./solver []"]


def test_ranks_of_several_nodes_use_the_interface_that_their_peers_reach(start: StartTask) -> None:
    share = start(order("python train.py", nodes=("node-1", "node-2"), ranks_per_node=1, env={"X": "1"}))
    (found,) = found_by(share)
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")


FORMS = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
print("world", dist.get_world_size(), "rank", os.environ["RANK"], "env", os.environ.get("VIRTUAL_ENV"))
dist.barrier()
dist.destroy_process_group()
"""


@needs_torch
def test_script_that_activates_an_environment_trains_in_the_worlds_of_its_job(start: StartTask) -> None:
    """Its real torchrun is found first, and its shell has replaced PYTHONPATH."""
    place = Path(sys.executable).parent
    activate = f"VIRTUAL_ENV={place.parent}; export VIRTUAL_ENV; PATH={place}:$PATH; hash -r 2>/dev/null"
    script = f"{activate}\nexport PYTHONPATH=$PWD\ntorchrun --nproc-per-node 2 train.py"
    setup = f"cat >train.py <<'END'\n{FORMS}\nEND\ncat >s.sh <<'END'\n{script}\nEND"
    share = start(order("bash s.sh", setup=setup))
    share.spawn()
    outcome = share.outcome(120)
    assert outcome.kind is EndKind.SUCCEEDED, share.describe()
    assert sorted(share.texts()) == [f"world 2 rank {rank} env {place.parent}" for rank in range(2)]
    assert outcome.world == World(size=2, ranks=2, is_whole=True)


@needs_torch
def test_real_torchrun_that_nothing_could_replace_does_not_succeed(start: StartTask) -> None:
    place = Path(sys.executable).parent / "torchrun"
    setup = f"cat >train.py <<'END'\n{FORMS}\nEND"
    run = f"env -i PATH=/usr/bin:/bin HOME=$HOME {place} --standalone --nproc-per-node 1 train.py"
    share = start(order(run, setup=setup))
    share.spawn()
    outcome = share.outcome(120)
    assert outcome.kind is EndKind.SPLIT_WORLD, share.describe()
    assert "`torchrun` started processes of its own inside of a rank" in outcome.message


@needs_torch
def test_two_programs_side_by_side_in_each_rank_do_not_succeed(start: StartTask) -> None:
    setup = f"tee a.py b.py <<'END' >/dev/null\n{STAYS}\nEND"
    share = start(order("python a.py & python b.py & wait", setup=setup))
    share.spawn()
    outcome = share.outcome(120)
    assert outcome.kind is EndKind.SPLIT_WORLD, share.describe()
    assert "started a launcher or a program while another one was still running" in outcome.message


@needs_torch
def test_check_of_all_ranks_hides_no_training_in_separate_groups(start: StartTask) -> None:
    """As `fabric run` calls torchrun: in its own process."""
    apart = "from torch.distributed.run import main; main(['--standalone', '--nproc-per-node=1', 'train.py'])"
    setup = f"cat >train.py <<'END'\n{FORMS}\nEND"
    share = start(order(f'torchrun train.py && python -c "{apart}"', setup=setup))
    share.spawn()
    outcome = share.outcome(120)
    assert outcome.kind is EndKind.SPLIT_WORLD, share.describe()
    assert outcome.world == World(size=1, ranks=2, is_whole=False)


STAYS = """
import os, time, torch.distributed as dist
refused = f"refused-{os.environ['RANK']}"
try:
    dist.init_process_group("gloo")
except RuntimeError:
    open(refused, "w").close()
    raise
while not os.path.exists(refused):
    time.sleep(0.05)
"""
ALONE = """
import os, torch.distributed as dist
own = f"file:///tmp/alone-{os.environ['RANK']}-{os.getpid()}"
dist.init_process_group("gloo", own, rank=0, world_size=1)
print("alone", flush=True)
"""
EVALUATES = """
import subprocess, sys, torch.distributed as dist
dist.init_process_group("gloo")
dist.new_group([0])
subprocess.run([sys.executable, "alone.py"], check=True)
dist.barrier()
dist.destroy_process_group()
"""


@needs_torch
def test_evaluation_beside_and_after_training_succeeds(start: StartTask) -> None:
    setup = f"cat >train.py <<'END'\n{EVALUATES}\nEND\ncat >alone.py <<'END'\n{ALONE}\nEND"
    share = start(order("torchrun train.py && python alone.py", setup=setup))
    share.spawn()
    outcome = share.outcome(120)
    assert outcome.kind is EndKind.SUCCEEDED, share.describe()
    assert share.texts() == ["alone"] * 4
    assert outcome.world == World(size=2, ranks=2, is_whole=True)


def test_real_torchrun_of_one_rank_on_a_node_starts_what_it_is_told_to(start: StartTask) -> None:
    """As in people's files for Slurm."""
    module = "mkdir -p own/torch/distributed; touch own/torch/__init__.py own/torch/distributed/__init__.py"
    told = "import os, sys; print('real', *sys.argv[1:], os.environ['SHOAL_LAUNCHER'], 'RANK' in os.environ)"
    setup = f'touch train.py; {module}; cat >own/torch/distributed/run.py <<"END"\n{told}\nEND'
    run = "torchrun --nnodes=$SLURM_NNODES --node_rank=$SLURM_NODEID --nproc_per_node=2 train.py"
    nodes = ("node-1", "node-2")
    fields = {"setup": setup, "nodes": nodes, "ranks_per_node": 1, "env": {"PYTHONPATH": "own"}}
    share = start(order(run, master_port=29612, **fields))
    assert share.run().kind is EndKind.SUCCEEDED, share.describe()
    expected = "--nnodes 2 --node-rank 0 --master-addr 127.0.0.1 --master-port 29612 --nproc_per_node=2"
    assert share.texts() == [f"real {expected} train.py torchrun True"]


@pytest.mark.parametrize(
    ("run", "named"),
    [
        ("nohup sleep 61 >log & echo begun", "1 process running, which end with the job: `sleep 61`"),
        ("(setsid sleep 62 &); (setsid sleep 62 &); echo begun", "2 processes running"),
        ("sleep 0.1 & echo begun", None),
    ],
)
def test_process_that_a_rank_leaves_running_is_named(start: StartTask, run: str, named: str | None) -> None:
    share = start(order(run, ranks_per_node=1, setup=None))
    assert share.run().kind is EndKind.SUCCEEDED, share.describe()
    told = [text for text in share.texts("e") if "have ended and left" in text]
    if named is None:
        assert not told
    else:
        assert len(told) == 1
        assert named in told[0]
        assert "let `run` wait for them" in told[0]


WAITS = "cat > waits.py <<'END'\nimport pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(63)\nEND"
IN_BACKGROUND = "{} waits.py & until [ -e begun ]; do sleep 0.01; done; "


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ("torchrun", 1),
        ("torchrun", 2),
        ("srun python", 2),
        pytest.param("mpirun -n 2 python", 1, marks=MPI),
        pytest.param("mpirun -n 2 python", 2, marks=MPI),
    ],
)
def test_launcher_left_in_the_background_fails_the_job(start: StartTask, launcher: str, ranks: int) -> None:
    run = (
        f"export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; {IN_BACKGROUND.format(launcher)}"
    )
    share = start(order(f"{run} echo done", ranks_per_node=ranks, setup=WAITS))
    end = share.run()
    assert end.kind is EndKind.SPLIT_WORLD, share.describe()
    assert "which ends with the job; let `run` wait for it" in end.message


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("rest", ["", "sleep 1"])
def test_launcher_left_in_the_background_before_it_has_read_its_options_fails_the_job(
    start: StartTask, rest: str, ranks: int
) -> None:
    package = "mkdir -p own/accelerate/commands; touch own/accelerate/{,commands/}__init__.py train.py"
    setup = f"{package}; echo 'import time; time.sleep(64)' > own/accelerate/commands/launch.py"
    run = f"nohup accelerate launch --mixed_precision bf16 train.py & {rest}"
    share = start(order(run, ranks_per_node=ranks, setup=setup, env={"PYTHONPATH": "own"}))
    end = share.run()
    assert end.kind is EndKind.SPLIT_WORLD, share.describe()
    assert "which ends with the job; let `run` wait for it" in end.message


@pytest.mark.parametrize(("last", "fields"), [("kill -9 %1", {}), ("echo done", {"may_split_world": True})])
def test_launcher_that_is_stopped_or_allowed_to_be_left_fails_no_job(
    start: StartTask, last: str, fields: dict[str, Any]
) -> None:
    share = start(order(IN_BACKGROUND.format("torchrun") + last, ranks_per_node=2, setup=WAITS, **fields))
    assert share.run().kind is EndKind.SUCCEEDED, share.describe()
