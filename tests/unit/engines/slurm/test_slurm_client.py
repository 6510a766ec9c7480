"""What Slurm's commands answer, by commands on paper."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from shoal.engines.slurm import client as client_module
from shoal.engines.slurm.client import CommandTransport
from shoal.engines.slurm.render import SlurmJobRequest
from shoal.errors import EngineRefused, EngineUnreachable
from tests.support.host.processes import is_alive


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def command(folder: Path, name: str, message: str, code: int) -> None:
    (folder / name).write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{message}\nEND\nexit {code}\n")
    (folder / name).chmod(0o755)


REQUEST = SlurmJobRequest(
    name="n", comment="c", nodes=("n0",), cpus=1, output="/dev/null", script="#!/bin/sh\n"
)
POLICY = "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size)"


@pytest.mark.parametrize(
    ("message", "code"),
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
def test_temporary_sbatch_error_is_no_refusal(folder: Path, message: str, code: int) -> None:
    command(folder, "sbatch", message, code)
    with pytest.raises(EngineUnreachable, match=re.escape(message.splitlines()[0].split(": ")[-1])):
        CommandTransport().submit(REQUEST)


def test_permanent_sbatch_error_is_refused_with_its_text(folder: Path) -> None:
    result = "Batch job submission failed: Requested node configuration is not available"
    command(folder, "sbatch", f"sbatch: error: {result}", 1)
    with pytest.raises(EngineRefused, match=result):
        CommandTransport().submit(REQUEST)


def test_a_job_that_could_not_be_cancelled_is_in_the_log(folder: Path) -> None:
    command(folder, "scancel", "scancel: error: Access/permission denied", 1)
    with capture_logs() as logs:
        CommandTransport().cancel(["shoal-att_1.0"])
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
    result = set(CommandTransport().version().splitlines())
    assert {"TZ=UTC", "SLURM_CONF=x"} <= result
    assert not [line for line in result if line.startswith(("SBATCH_", "SQUEUE_", "SLURM_MEM"))]


@pytest.mark.parametrize("runs_as", ["ourselves", "whoever logs in", "owners"])
def test_jobs_are_asked_for_in_every_partition_also_in_hidden_ones(folder: Path, runs_as: str) -> None:
    ssh_on_paper(folder)
    (folder / "squeue").write_text(f'#!/bin/sh\necho "$@" >{folder}/asked\n')
    (folder / "squeue").chmod(0o755)
    CommandTransport(
        "ana@login" if runs_as == "whoever logs in" else "", as_owners=runs_as == "owners"
    ).jobs()
    assert {"--all", "--states=all"} <= set((folder / "asked").read_text().split())


def ssh_on_paper(folder: Path, code: str = 'for last; do :; done; exec sh -c "$last"') -> Path:
    """Its words, one on each line, are in the file."""
    (folder / "ssh").write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" >{folder}/words\n{code}\n")
    (folder / "ssh").chmod(0o755)
    return folder / "words"


def test_over_ssh_nothing_of_ours_is_offered_to_the_login_node(folder: Path, tmp_path: Path) -> None:
    text = ssh_on_paper(folder, "echo slurm 22.05.8")
    assert CommandTransport("ana@login", ("-o", "ForwardAgent=yes", "-p", "22")).version() == "slurm 22.05.8"
    lines = text.read_text().splitlines()
    assert lines[:4] == ["-o", "ForwardAgent=yes", "-p", "22"]  # of two `ssh` takes the first
    assert {"BatchMode=yes", "ForwardAgent=no", "ForwardX11=no", "ClearAllForwardings=yes"} <= set(lines)
    assert "RequestTTY=no" in lines
    assert not [word for word in lines if word.startswith("Control")]
    assert lines[-3:] == ["--", "ana@login", "env TZ=UTC LC_ALL=C sinfo --version"]


def test_a_connection_is_kept_in_a_folder_that_nobody_else_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ssh_on_paper(folder, "echo slurm 22.05.8")
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as home:
        sockets = Path(home) / "ssh"

        def kept() -> bool:
            CommandTransport("ana@login", sockets=sockets).version()
            return f"ControlPath={sockets}/%C" in text.read_text().splitlines()

        assert kept()
        assert (sockets.stat().st_mode & 0o777, list(sockets.iterdir())) == (0o700, [])
        sockets.chmod(0o755)
        assert not kept()
        sockets.chmod(0o700)
        sockets = sockets / ("deep" * 20)
        assert not kept()  # the path would be too long for a socket
        sockets = Path(home) / "a b"
        assert not kept()


def test_what_a_command_says_is_understood_whatever_language_people_have(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    ssh_on_paper(folder)
    (folder / "mkdir").write_text(
        '#!/bin/sh\n[ "$LC_ALL" = C ] && echo Permission denied >&2 || echo Keine Berechtigung >&2; exit 1\n'
    )
    (folder / "mkdir").chmod(0o755)
    with pytest.raises(EngineRefused, match="Permission denied"):
        CommandTransport("ana@login").make_folder("/scratch/x")


def test_an_ssh_that_stays_behind_for_the_next_question_is_not_waited_for(folder: Path) -> None:
    """As those do that keep a connection: some versions hold their standard error meanwhile."""
    ssh_on_paper(folder, "sleep 20 >/dev/null </dev/null & echo $! >" + f"{folder}/pid; echo slurm 22.05.8")
    began = time.monotonic()
    try:
        assert CommandTransport("ana@login").version() == "slurm 22.05.8"
        assert time.monotonic() - began < 10
    finally:
        os.kill(int((folder / "pid").read_text()), signal.SIGKILL)


SOURCELESS = (
    "sinfo: error: fetch_config: DNS SRV lookup failed\n"
    "sinfo: fatal: Could not establish a configuration source"
)
AWAY = "slurm_load_partitions: Unable to contact slurm controller (connect failure)"


def hint_of(door: CommandTransport) -> str:
    with pytest.raises(EngineUnreachable) as away:
        door.version()
    return str(away.value.hint)


def test_what_to_type_next_depends_on_what_is_wrong(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    command(folder, "sinfo", SOURCELESS, 1)
    assert hint_of(CommandTransport()).startswith(
        "set SLURM_CONF, or go to a login node, or name one: `shoal connect"
    )
    command(folder, "sinfo", AWAY, 1)
    assert hint_of(CommandTransport()).startswith("`scontrol ping`")
    command(folder, "ssh", AWAY, 1)
    assert hint_of(CommandTransport("ana@login", ["-p", "22"])).startswith(
        "`ssh -p 22 ana@login scontrol ping`"
    )
    command(folder, "ssh", "ssh: Could not resolve hostname login: Name or service not known", 255)
    assert hint_of(CommandTransport("ana@login")) == "`ssh ana@login sinfo`"
    monkeypatch.setenv("PATH", str(folder / "empty"))
    assert hint_of(CommandTransport()).startswith("go to a login node")


def test_a_command_that_does_not_end_says_by_whose_configuration(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "TIMEOUT_S", 0.5)
    monkeypatch.setenv("SLURM_CONF", "/nope/slurm.conf")
    (folder / "sinfo").write_text("#!/bin/sh\necho 'sinfo: error: cannot stat file' >&2\nexec sleep 20\n")
    (folder / "sinfo").chmod(0o755)
    with pytest.raises(EngineUnreachable) as late:
        CommandTransport().version()
    result = (
        "sinfo did not answer within 0.5 s by SLURM_CONF=/nope/slurm.conf: sinfo: error: cannot stat file"
    )
    assert late.value.message == result
    assert str(late.value.hint).startswith("`ls -l /nope/slurm.conf`, or set SLURM_CONF")


@pytest.mark.parametrize("over", ["", "ana@login"])
@pytest.mark.parametrize("stream", [1, 2])
def test_endless_output_of_sbatch_is_cut_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stream: int, over: str
) -> None:
    monkeypatch.setattr(client_module, "TIMEOUT_S", 20.0)
    ssh_on_paper(folder)
    much = f"head -c {4 * client_module.SMALL_OUTPUT} /dev/zero >&{stream}"
    (folder / "sbatch").write_text(f"#!/bin/sh\necho $$ >{folder}/pid\n{much}\nexec sleep 60\n")
    (folder / "sbatch").chmod(0o755)
    with pytest.raises(EngineUnreachable, match=f"more than {client_module.SMALL_OUTPUT} bytes"):
        CommandTransport(over).submit(REQUEST)
    if not over:
        assert not is_alive(int((folder / "pid").read_text()))


def test_command_with_slow_endless_output_times_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "TIMEOUT_S", 0.5)
    (folder / "sbatch").write_text("#!/bin/sh\nwhile echo x; do sleep 0.05; done\n")
    (folder / "sbatch").chmod(0o755)
    with pytest.raises(EngineUnreachable, match=r"did not answer within 0\.5 s"):
        CommandTransport().submit(REQUEST)


def test_lists_of_slurm_may_be_long_and_so_may_scripts(folder: Path) -> None:
    long = "x" * (4 * client_module.SMALL_OUTPUT)
    (folder / "sinfo").write_text(f"#!/bin/sh\nhead -c {len(long)} /dev/zero | tr '\\0' x\n")
    (folder / "sbatch").write_text("#!/bin/sh\nwc -c\n")
    for name in ("sinfo", "sbatch"):
        (folder / name).chmod(0o755)
    assert CommandTransport().version() == long
    assert CommandTransport().submit(msgspec.structs.replace(REQUEST, script=long)) == str(len(long))
