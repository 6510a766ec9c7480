"""How a share's end and what follows it are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.runtime.confine.view import PRIVATE
from shoal.runtime.ending import describe, of_rank, recovered
from shoal.wire import Recovery


@pytest.mark.parametrize(
    ("kept", "spares", "lost", "words"),
    [
        (1, 1, 1, "1 step lost: 1 rank lived on, 1 was waiting"),
        (3, 0, 0, "0 steps lost: 3 ranks lived on, 0 were waiting"),
    ],
)
def test_one_is_not_told_as_many(kept: int, spares: int, lost: int, words: str) -> None:
    times: dict[str, Any] = {"failed_at": 0.0, "formed_s": 0.1, "joined_s": 0.2, "stepped_s": 0.25}
    told = Recovery(generation=1, node="n1", kept=kept, spares=spares, steps_lost=lost, first_step=9, **times)
    assert recovered(told) == f"group 1 made its first step 0.25 s after the failure, {words}"


@pytest.mark.parametrize(
    "said",
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
def test_program_that_a_shell_did_not_find_is_named(said: str) -> None:
    assert describe(127 << 8, said) == "exited with code 127: program `train` not found"


def test_who_has_no_python_is_told_what_to_say_instead() -> None:
    told = describe(127 << 8, "/bin/bash: line 1: python: command not found")
    assert told.startswith("exited with code 127: program `python` not found; say `python3`, or ")


@pytest.mark.parametrize(
    ("code", "said", "words"),
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
def test_no_program_is_named_that_nobody_missed(code: int, said: str, words: str) -> None:
    assert describe(code << 8, said) == f"exited with code {code}{words}"


def test_a_program_below_tmp_that_the_node_has_is_told_to_be_hidden_from_the_job(tmp_path: Path) -> None:
    program = tmp_path / "env" / "bin" / "python"
    said = f"bash: line 1: {program}: No such file or directory"
    if not str(program).startswith(PRIVATE):
        pytest.skip("the temporary directory is elsewhere")
    assert describe(127 << 8, said) == f"exited with code 127: program `{program}` not found"
    program.parent.mkdir(parents=True)
    program.touch()
    told = describe(127 << 8, said)
    assert "the node has it, but the /tmp of a job is its own" in told
    assert "`mounts: [DIR:DIR:ro]`" in told


@pytest.mark.parametrize("module", ["shoal", "shoal.runtime.lightning"])
def test_program_whose_environment_lacks_shoal_is_told_what_to_install(module: str) -> None:
    said = f"Traceback (most recent call last):\n  File ...\nModuleNotFoundError: No module named '{module}'"
    told = describe(1 << 8, said)
    assert "`pip install shoal-runtime` in the program's environment" in told
    assert "`pip install ./packages/runtime` from a clone" in told
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
def test_rank_that_begins_mpi_by_itself_is_told_what_to_write(last_words: str) -> None:
    end = of_rank(2, 1 << 8, is_out_of_memory=False, grace_s=1.0, last_words=last_words)
    assert "with `mpirun PROGRAM` in `run`" in end.message
    other = of_rank(2, 1 << 8, is_out_of_memory=False, grace_s=1.0, last_words="ValueError: bad")
    assert "mpirun" not in other.message
    alone = of_rank(0, 1 << 8, is_out_of_memory=False, grace_s=1.0, last_words=last_words, is_alone=True)
    assert "with `mpirun PROGRAM` in `run`" not in alone.message
