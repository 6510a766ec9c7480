"""Command lines of `mpirun`: how they are parsed, and what the real launcher gets."""

from __future__ import annotations

import pytest

from shoal.runtime.warm import mpi_command_line

VERSIONS = {
    "mpirun.openmpi (OpenRTE) 4.1.4\n\nReport bugs to": mpi_command_line.OPEN_MPI_4,
    "mpirun (Open MPI) 4.1.2": mpi_command_line.OPEN_MPI_4,
    "mpirun (Open MPI) 5.0.11": mpi_command_line.OPEN_MPI_5,
    "prterun (PRRTE) 3.0.13": mpi_command_line.OPEN_MPI_5,
    "HYDRA build details:\n    Version:                                 4.0.2": mpi_command_line.HYDRA,
    "Intel(R) MPI Library for Linux* OS, Version 2021.13": None,
    "": None,
}


def read(command: str) -> list[mpi_command_line.MpiProgram]:
    return mpi_command_line.read(command.split(), lambda word: word in ("prog", "python", "4"))


@pytest.mark.parametrize(
    ("command", "count", "program"),
    [
        ("-n 4 python train.py -n 3", "4", "python train.py -n 3"),
        ("-np 4 --allow-run-as-root --bind-to none ./a.out", "4", "./a.out"),
        ("--np=2 --mca btl ^openib -H a:1,b:1 -x LR=0.1 -x PATH python t.py", "2", "python t.py"),
        ("-ppn 2 -genv LR 0.1 --hostfile hosts prog -x", None, "prog -x"),
        ("-n 2", "2", ""),
        ("--new-flag prog --lr 1", None, "prog --lr 1"),
        ("--new-option 4 prog", None, "prog"),
        ("--new-flag -n 4 prog", "4", "prog"),
    ],
)
def test_program_is_the_first_word_that_belongs_to_no_option(
    command: str, count: str | None, program: str
) -> None:
    (mpi_program,) = read(command)
    assert (mpi_program.count, mpi_program.argv) == (count, program.split())
    assert mpi_program.variables == ({"LR": "0.1"} if "LR" in command else {})


def test_options_that_choose_hosts_slots_or_agents_are_left_out_and_others_are_passed_on() -> None:
    (mpi_program,) = read(
        "--hostfile h -H a:2 --map-by node --oversubscribe --mca plm_rsh_agent ssh --mca btl tcp,self "
        "-launcher ssh -f hosts --bind-to core -l -wdir /data --timeout 60 prog"
    )
    assert mpi_program.options == ["--mca", "btl", "tcp,self", "--bind-to", "core", "-l", "--timeout", "60"]
    assert (mpi_program.directory, mpi_program.argv) == ("/data", ["prog"])


def test_several_programs_make_one_world() -> None:
    first, second = read("-n 1 python a.py : -n 3 -x B=2 prog : python")[:2]
    assert (first.count, first.argv) == ("1", ["python", "a.py"])
    assert (second.count, second.argv, second.variables) == ("3", ["prog"], {"B": "2"})


@pytest.mark.parametrize(
    "command", ["prog", "-n 4 prog", "-N 2 prog", "-n 1 prog : -n 3 prog", "-ppn 2 prog"]
)
def test_command_that_agrees_with_the_job_is_taken(command: str) -> None:
    assert mpi_command_line.problem(read(command), 4, 2) == ("", "")


@pytest.mark.parametrize(
    ("command", "problem", "hint"),
    [
        ("-n 8 prog", "asks for 8 processes, and the job has 4", "`ranks_per_node: 4`"),
        ("-n 2 prog", "asks for 2 processes, and the job has 4", "`ranks_per_node: 1`"),
        ("-n 3 prog", "asks for 3 processes, and the job has 4", "write `-n 4`, or leave the option out"),
        ("-n 0 prog", "asks for `0` processes", "leave the option out"),
        ("-n many prog", "asks for `many` processes", "leave the option out"),
        ("-N 4 prog", "asks for 4 processes on each node", "`ranks_per_node: 4`"),
        ("--pernode prog", "asks for 1 processes on each node", "`ranks_per_node: 1`"),
        ("-n 2 prog : -n 4 prog", "asks for 6 processes", "`ranks_per_node: 3`"),
        ("-n 2 prog : prog", "no number of processes for each", "before each program"),
        ("-n 4", "no program", "`mpirun PROGRAM`"),
        ("-configfile lines", "whose file Shoal does not read", "in `run`"),
    ],
)
def test_command_that_contradicts_the_job_is_refused_with_what_to_write(
    command: str, problem: str, hint: str
) -> None:
    refusal = mpi_command_line.problem(read(command), 4, 2)
    assert problem in refusal[0]
    assert hint in refusal[1]


@pytest.mark.parametrize(("version", "kind"), VERSIONS.items())
def test_kind_of_mpi_is_recognized_by_its_version_text(version: str, kind: str | None) -> None:
    assert mpi_command_line.flavour(version) == kind


@pytest.mark.parametrize(
    "kind", [mpi_command_line.OPEN_MPI_4, mpi_command_line.OPEN_MPI_5, mpi_command_line.HYDRA]
)
def test_real_launcher_gets_our_hosts_and_our_agent(kind: str) -> None:
    programs = read("-n 1 --report-bindings -x A=1 prog -l : -n 3 -wdir /data python t.py")
    before = mpi_command_line.options(
        kind, agent="our-agent", hosts="/hosts", address="10.0.0.7", is_root=False
    )
    command = mpi_command_line.command("/opt/mpirun", before, programs, 4, ["place"])
    assert command[0] == "/opt/mpirun"
    assert "our-agent" in command
    assert "/hosts" in command
    assert "--allow-run-as-root" not in command
    first, second = " ".join(command).split(" : ")
    assert first.endswith("--report-bindings -wdir / -n 1 place A=1 -- prog -l")
    assert second == "-wdir / -n 3 place -wdir=/data -- python t.py"


def test_ranks_are_bound_to_no_core_unless_the_person_says_so() -> None:
    before = mpi_command_line.options(
        mpi_command_line.HYDRA, agent="a", hosts="h", address="10.0.0.7", is_root=False
    )
    assert "-bind-to none" in " ".join(mpi_command_line.command("m", before, read("prog"), 4, ["place"]))
    bound = mpi_command_line.command("m", before, read("-bind-to core prog"), 4, ["place"])
    assert [word for word in bound if word in ("none", "core")] == ["core"]


def test_hosts_are_the_nodes_of_the_job_in_their_order() -> None:
    lines = mpi_command_line.host_lines(mpi_command_line.OPEN_MPI_4, 2, 8)
    assert lines == "shoal-mpi-0 slots=8\nshoal-mpi-1 slots=8\n"
    assert mpi_command_line.host_lines(mpi_command_line.HYDRA, 1, 3) == "shoal-mpi-0:3\n"
    assert [
        mpi_command_line.node_of(host) for host in ("shoal-mpi-1", "shoal-mpi-", "other", "localhost")
    ] == [
        *(1, None, None, None),
    ]
