"""MPI programs get one world over the nodes of their job, from the real Open MPI and MPICH, or an error that
says what to write. Two supervisors on this machine stand for two nodes.
"""

from __future__ import annotations

import importlib.util
import shutil
import signal
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.wire import EndKind, TaskCredentials, TaskOutcome
from tests.support.runtime.tasks import RunningTask, StartTask, a_task_spec, tasks_in, until

pytestmark = pytest.mark.skipif(
    any(shutil.which(f"mpicc.{kind}") is None for kind in ("openmpi", "mpich")),
    reason="no MPI: apt-get install libopenmpi-dev openmpi-bin libmpich-dev mpich",
)
MPI4PY = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="no mpi4py: pip install mpi4py"
)
C_PROGRAM = """
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int main(int argc, char **argv) {
    int rank, size, mine, sum;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    mine = rank + 1;
    MPI_Allreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    printf("rank %d of %d, RANK %s, sum %d\\n", rank, size, getenv("RANK"), sum);
    fflush(stdout);
    if (argc > 1) pause();
    MPI_Finalize();
    return 0;
}
"""
PROGRAM = """
import os, signal, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
mine = world.rank + 1
group = os.environ["SHOAL_RENDEZVOUS_ROUND"]
place = f"rank {world.rank} of {world.size}, RANK {os.environ['RANK']}"
print(f"{place}, sum {world.allreduce(mine)}, group {group}")
sys.stdout.flush()
if "die" in sys.argv and group == "0" and world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if "fail" in sys.argv and world.rank == 1:
    os._exit(9)
if "abort" in sys.argv and world.rank == 1:
    world.Abort(7)
if len(sys.argv) > 1 and group == "0":
    world.recv(source=1)
"""
Job = Callable[..., list[RunningTask]]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Runs a job with one supervisor for each node, and returns them when all have ended. With `num_lines`
    they are told to end when their ranks have written so many.
    """

    def run(
        command: str, *, nodes: int = 2, ranks: int = 2, num_lines: int = 0, **changes: object
    ) -> list[RunningTask]:
        names = tuple(f"node-{number}" for number in range(nodes))
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = int(probe.getsockname()[1])
        common = {
            "attempt_id": f"att_{uuid.uuid4().hex}",
            "nodes": names,
            "master_port": port,
            "run": command,
        }
        parts = [
            start(
                a_task_spec(
                    **{**common, "node": name, "node_rank": rank, "ranks_per_node": ranks, **changes}
                ),
                TaskCredentials(job_token="token"),
            )
            for rank, name in enumerate(names)
        ]
        for part in parts:
            part.spawn()
        if num_lines:
            until(lambda: len(texts(parts)) >= num_lines, 60.0, parts[0].describe)
            for part in parts:
                part.processes[0].send_signal(signal.SIGTERM)
        for part in parts:
            part.outcome(60.0)
        return parts

    with tasks_in(tmp_path) as start:
        yield run


def outcomes(parts: list[RunningTask]) -> list[TaskOutcome]:
    return [part.outcome() for part in parts]


def texts(parts: list[RunningTask]) -> list[str]:
    """What the program wrote, of all ranks; not what a launcher says of ranks that were stopped."""
    return sorted(text for part in parts for text in part.texts() if text.startswith("rank "))


def of_world(size: int, end: str = "") -> list[str]:
    total = size * (size + 1) // 2
    return [f"rank {rank} of {size}, RANK {rank}, sum {total}{end}" for rank in range(size)]


def compiled(kind: str) -> str:
    return f"cat > it.c <<'END'\n{C_PROGRAM}\nEND\nmpicc.{kind} it.c -o it"


def written() -> str:
    return f"cat > it.py <<'END'\n{PROGRAM}\nEND"


def test_program_in_c_finds_one_world_over_both_nodes(job: Job) -> None:
    parts = job("mpirun.openmpi ./it", setup=compiled("openmpi"))
    assert {end.kind for end in outcomes(parts)} == {EndKind.SUCCEEDED}, [p.describe() for p in parts]
    assert all(end.world is not None and end.world.is_whole for end in outcomes(parts))
    assert texts(parts) == of_world(4)
    assert texts(parts[1:]) == of_world(4)[2:]


def test_script_that_unsets_the_variables_of_its_rank_still_gets_one_world(job: Job) -> None:
    """Many batch files do so before `mpirun`. Four copies of the program would succeed as well."""
    parts = job("unset RANK WORLD_SIZE LOCAL_RANK; mpirun.openmpi -n 4 ./it", setup=compiled("openmpi"))
    assert {end.kind for end in outcomes(parts)} == {EndKind.SUCCEEDED}, [p.describe() for p in parts]
    assert texts(parts) == [f"rank {rank} of 4, RANK (null), sum 10" for rank in range(4)]


# MPICH 4.0 over TCP may hang in MPI_Finalize, without Shoal too: this program is stopped before.
@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_world_over_both_nodes_ends_when_it_is_told_to(job: Job, kind: str) -> None:
    parts = job(f"mpirun.{kind} ./it stay", setup=compiled(kind), num_lines=4)
    assert texts(parts) == of_world(4)
    assert {end.kind for end in outcomes(parts)} == {EndKind.STOPPED}, [p.describe() for p in parts]


@MPI4PY
def test_program_in_python_finds_one_world_each_time_it_is_started(job: Job) -> None:
    run = "mpirun -n 4 python it.py && mpiexec -n 1 python it.py : -n 3 python it.py"
    parts = job(run, setup=written())
    assert {end.kind for end in outcomes(parts)} == {EndKind.SUCCEEDED}, [p.describe() for p in parts]
    assert texts(parts) == sorted(2 * of_world(4, ", group 0"))


@MPI4PY
def test_ranks_that_begin_anew_are_one_world_again(job: Job) -> None:
    (part,) = job("mpirun python it.py die", nodes=1, max_restarts=1, setup=written())
    assert part.outcome().kind is EndKind.SUCCEEDED, part.describe()
    assert texts([part]) == sorted([*of_world(2, ", group 0"), *of_world(2, ", group 1")])


@MPI4PY
@pytest.mark.parametrize(("how", "code"), [("fail", 9), ("abort", 7)])
def test_job_ends_as_the_rank_that_fails(job: Job, how: str, code: int) -> None:
    (part,) = job(f"mpirun python it.py {how}", nodes=1, setup=written())
    end = part.outcome()
    assert (end.kind, end.exit_code, end.rank) == (EndKind.EXITED, code, 1), part.describe()


def test_rank_that_chooses_a_component_of_open_mpi_is_no_world_of_its_own(job: Job) -> None:
    (part,) = job("OMPI_MCA_op=^avx ./it", nodes=1, setup=compiled("openmpi"))
    assert part.outcome().kind is EndKind.EXITED, part.describe()
    assert texts([part]) == []


@pytest.mark.parametrize("options", ["openmpi --allow-run-as-root --mca plm isolated", "mpich"])
def test_mpirun_with_an_emptied_environment_does_not_succeed(job: Job, options: str) -> None:
    kind = options.partition(" ")[0]
    run = f"env -i RANK=0 /usr/bin/mpirun.{options} -n 1 /bin/sh -c './it && sleep 5'"
    (part,) = job(run, nodes=1, setup=compiled(kind))
    end = part.outcome()
    assert end.kind is EndKind.SPLIT_WORLD, part.describe()
    assert "`mpirun` started processes of its own inside of a rank" in end.message


@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
@pytest.mark.parametrize("run", ["./it", "/usr/bin/mpirun.KIND -n 2 ./it", "mpirun.OTHER ./it"])
def test_rank_that_begins_mpi_in_another_way_fails_and_says_what_to_write(
    job: Job, kind: str, run: str
) -> None:
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    other = "mpich" if kind == "openmpi" else "openmpi"
    run = run.replace("KIND", kind).replace("OTHER", other)
    (part,) = job(run, nodes=1, setup=compiled(kind), env=as_root)
    end = part.outcome()
    assert end.kind is EndKind.EXITED
    assert "Start the program with `mpirun PROGRAM` in `run`" in end.message
    assert texts([part]) == []


def test_node_without_a_launcher_says_what_to_install(start: StartTask) -> None:
    share = start(a_task_spec(run="PATH=${PATH%%:*}:/nowhere mpirun ./it", ranks_per_node=2))
    assert share.run().exit_code == 2
    assert any("apt-get install openmpi-bin" in line for line in share.texts("e"))
