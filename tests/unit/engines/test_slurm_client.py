"""What Slurm's commands answer, by commands on paper."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shoal.engines.slurm.client import CommandDoor
from shoal.engines.slurm.render import Request
from shoal.errors import EngineRefused, EngineUnreachable


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def command(folder: Path, name: str, said: str, code: int) -> None:
    (folder / name).write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{said}\nEND\nexit {code}\n")
    (folder / name).chmod(0o755)


REQUEST = Request(name="n", comment="c", nodes=("n0",), cpus=1, output="/dev/null", script="#!/bin/sh\n")
POLICY = "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size)"


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (f"sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: {POLICY}", 1),
        (f"sbatch: error: {POLICY}", 1),
        ("sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying", 1),
        (
            "sbatch: error: Job submission failed: Required partition not available (inactive or drain)",
            1,
        ),
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination", 1),
        ("sbatch: error: Batch job submission failed: Invalid node name specified", 1),
        ("sh: 1: sbatch: not found", 127),
        ("sh: 1: sbatch: Permission denied", 126),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller", 1),
    ],
)
def test_what_may_pass_is_no_refusal(folder: Path, said: str, code: int) -> None:
    command(folder, "sbatch", said, code)
    with pytest.raises(EngineUnreachable, match=re.escape(said.splitlines()[0].split(": ")[-1])):
        CommandDoor().submit(REQUEST)


def test_what_will_never_be_is_refused_in_the_words_of_slurm(folder: Path) -> None:
    told = "Batch job submission failed: Requested node configuration is not available"
    command(folder, "sbatch", f"sbatch: error: {told}", 1)
    with pytest.raises(EngineRefused, match=told):
        CommandDoor().submit(REQUEST)


def test_a_job_that_could_not_be_cancelled_is_in_the_log(folder: Path) -> None:
    command(folder, "scancel", "scancel: error: Access/permission denied", 1)
    with capture_logs() as logs:
        CommandDoor().cancel(["shoal-att_1.0"])
    [entry] = logs
    assert (entry["event"], entry["said"]) == (
        "slurm.scancel_failed",
        "scancel: error: Access/permission denied",
    )


def test_commands_are_asked_in_utc_and_without_what_people_have_set_for_theirs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SBATCH_PARTITION", "SLURM_MEM_PER_CPU", "SQUEUE_PARTITION", "SLURM_CONF"):
        monkeypatch.setenv(name, "x")
    (folder / "sinfo").write_text("#!/bin/sh\nenv\n")
    (folder / "sinfo").chmod(0o755)
    told = set(CommandDoor().version().splitlines())
    assert {"TZ=UTC", "SLURM_CONF=x"} <= told
    assert not [line for line in told if line.startswith(("SBATCH_", "SQUEUE_", "SLURM_MEM"))]
