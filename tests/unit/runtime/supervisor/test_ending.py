"""The messages for the end of a task and for a recovery."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.runtime.confine.sandbox_view import PRIVATE
from shoal.runtime.supervisor.endings import describe, describe_recovery, of_rank
from shoal.wire import Recovery


@pytest.mark.parametrize(
    ("kept", "spares", "lost", "expected"),
    [
        (1, 1, 1, "1 step lost: 1 rank lived on, 1 was waiting"),
        (3, 0, 0, "0 steps lost: 3 ranks lived on, 0 were waiting"),
    ],
)
def test_recovery_message_uses_singular_and_plural(kept: int, spares: int, lost: int, expected: str) -> None:
    times: dict[str, Any] = {"failed_at": 0.0, "formed_s": 0.1, "joined_s": 0.2, "stepped_s": 0.25}
    message = Recovery(
        rendezvous_round=1,
        node="n1",
        surviving_ranks=kept,
        spare_ranks=spares,
        steps_lost=lost,
        first_step=9,
        **times,
    )
    assert describe_recovery(message) == f"group 1 made its first step 0.25 s after the failure, {expected}"


@pytest.mark.parametrize(
    "output",
    [
        "/bin/bash: line 1: train: command not found",
        "/bin/sh: 1: train: not found",
        "env: \u2018train\u2019: No such file or directory",
        "/usr/bin/env: 'train': No such file or directory",
        "train: command not found",
        "/bin/bash: line 1: train: No such file or directory",
        "lint: not found\n/work/run.sh: line 7: train: command not found\ngiving up",
    ],
)
def test_message_names_a_program_that_the_shell_did_not_find(output: str) -> None:
    assert describe(127 << 8, output) == "exited with code 127: program `train` not found"


def test_message_for_missing_python_suggests_python3() -> None:
    message = describe(127 << 8, "/bin/bash: line 1: python: command not found")
    assert message.startswith("exited with code 127: program `python` not found; say `python3`, or ")


@pytest.mark.parametrize(
    ("code", "output", "expected"),
    [
        (127, "", ": program not found"),
        (127, "ValueError: key: it was not found", ": program not found"),
        (127, "bash: line 1: ./x.py: cannot execute: required file not found", ": program not found"),
        (3, "/bin/bash: line 1: python: command not found", ""),
        (127, "cat: data.csv: No such file or directory", ": program not found"),
        (
            127,
            "x: error while loading shared libraries: libcuda.so.1: cannot open: No such file or directory",
            ": shared library `libcuda.so.1` not found",
        ),
    ],
)
def test_message_names_no_program_that_was_found(code: int, output: str, expected: str) -> None:
    assert describe(code << 8, output) == f"exited with code {code}{expected}"


def test_message_says_that_a_job_does_not_see_the_nodes_tmp(tmp_path: Path) -> None:
    program = tmp_path / "env" / "bin" / "python"
    output = f"bash: line 1: {program}: No such file or directory"
    if not str(program).startswith(PRIVATE):
        pytest.skip("the temporary directory is elsewhere")
    assert describe(127 << 8, output) == f"exited with code 127: program `{program}` not found"
    program.parent.mkdir(parents=True)
    program.touch()
    message = describe(127 << 8, output)
    assert "the node has it, but the /tmp of a job is its own" in message
    assert "`mounts: [DIR:DIR:ro]`" in message


@pytest.mark.parametrize("module", ["shoal", "shoal.runtime.lightning"])
def test_message_for_an_environment_without_shoal_says_what_to_install(module: str) -> None:
    output = (
        f"Traceback (most recent call last):\n  File ...\nModuleNotFoundError: No module named '{module}'"
    )
    message = describe(1 << 8, output)
    assert "`pip install shoal-runtime` in the program's environment" in message
    assert "`pip install ./packages/runtime` from a clone" in message
    assert describe(1 << 8, "ModuleNotFoundError: No module named 'shoals'") == "exited with code 1"


@pytest.mark.parametrize(
    "last_words",
    [
        "[vm:5] *** on a NULL communicator\n[vm:5] *** Unknown error",
        "*** An error occurred in MPI_Init\n*** on a NULL communicator",
        "MPIR_pmi_init(101)...: PMI_Init returned -1",
        "[mpiexec@vm] HYDT_bsci_init (bsci_init.c:173): unrecognized RMK: start_it_with_mpirun",
        "An internal error has occurred in ORTE:",
        "  orte_ess_init failed\n  --> Returned value Error (-1) instead of ORTE_SUCCESS",
        "of factors, including an inability to create a connection back\nto mpirun due to a lack of common",
    ],
)
def test_message_for_mpi_without_mpirun_says_what_to_write(last_words: str) -> None:
    end = of_rank(2, 1 << 8, is_out_of_memory=False, grace_s=1.0, output_tail=last_words)
    assert "with `mpirun PROGRAM` in `run`" in end.message
    other = of_rank(2, 1 << 8, is_out_of_memory=False, grace_s=1.0, output_tail="ValueError: bad")
    assert "mpirun" not in other.message
    alone = of_rank(0, 1 << 8, is_out_of_memory=False, grace_s=1.0, output_tail=last_words, is_alone=True)
    assert "with `mpirun PROGRAM` in `run`" not in alone.message
