"""`shoal connect slurm` over fake Slurm commands: the user it connects as, and where it saves that."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shoal.cli.checkup.machine import Level
from shoal.cli.checkup.server import check_slurm
from shoal.cli.connect.slurm import partition_text
from shoal.clock import SystemClock
from shoal.engines.home_records import read_cluster, write_cluster
from shoal.engines.local.spool_index import SpoolIndex
from shoal.engines.remote.mailbox import Mailbox
from shoal.engines.slurm.config import load_config
from shoal.wire import EndKind, TaskSpecRequest
from tests.support.fakes.api_server import Shell
from tests.support.slurm.fake_slurm import NODE, slurm_task_spec
from tests.unit.engines.slurm.test_slurm_rest import Paper, on_paper
from tests.unit.engines.slurm.test_slurm_rest_messages import RECORDED, token

COMMANDS = {
    "sinfo": "echo slurm 22.05.8",
    "scontrol": f"""case $* in
*partition*) echo "$PARTITIONS" ;;
*config*) printf 'ClusterName = %s\\nSlurmctldHost[0] = a(10.0.0.1)\\n' "${{FAKE_CLUSTER:-lab}}"
  echo "$MORE" ;;
*) echo '{NODE.format(state="IDLE", reason="none")}' ;;
esac""",
    "ssh": 'echo "$@" >>"$SAID"\nfor last; do :; done\nexec sh -c "$last"',
    "id": 'case $* in -un) echo "${FAKE_NAME:-ana}" ;; *) echo "$FAKE_UID" ;; esac',
    "sacctmgr": 'test -n "$ACCOUNTS" && echo "$ACCOUNTS"',
}
CONNECT = ("connect", "slurm", "--ssh", "ana@login", "--nodes-on", "127.0.0.1:7464")


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    monkeypatch.setenv("FAKE_UID", "1000")
    return Shell(tmp_path / "home", monkeypatch, capsys)


def test_root_is_refused_without_as_root(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_UID", "0")
    refused = shell(*CONNECT)
    assert (refused.code, "all jobs would run as root" in refused.err) == (2, True)
    assert not (shell.home / "slurm.json").exists()
    assert shell(*CONNECT, "--as-root").code == 0
    assert shell(*CONNECT, "--json").code == 2


def test_root_is_refused_even_with_as_root_if_slurm_disables_root_jobs(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_UID", "0")
    monkeypatch.setenv("MORE", "DisableRootJobs         = Yes")
    for flags in ((), ("--as-root",)):
        refused = shell(*CONNECT, *flags)
        assert refused.code == 2
        assert "this Slurm runs no job of root's (DisableRootJobs=YES)" in " ".join(refused.err.split())
        assert "--as-root" not in refused.err
    assert not (shell.home / "slurm.json").exists()
    assert shell(*CONNECT, "--as-owners").code == 0
    monkeypatch.setenv("FAKE_UID", "1000")
    assert shell(*CONNECT).code == 0


def test_connect_names_whose_jobs_will_run(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_UID", "0")
    monkeypatch.setenv("FAKE_NAME", "root")
    output = shell(*CONNECT, "--as-root").out
    assert "run under the account `root`\n" in output
    assert "ProctrackType is not known to be proctrack/cgroup" in output


@pytest.mark.parametrize(
    ("pool", "expected"), [(3, ""), (1, ", 1 of them in this pool"), (0, ", all of them in other pools")]
)
def test_a_partition_whose_nodes_are_in_other_pools_says_so(pool: int, expected: str) -> None:
    partition = {
        "name": "high",
        "is_default": False,
        "nodes": 3,
        "pool": pool,
        "max_minutes": None,
        "state": "UP",
    }
    assert partition_text(partition) == f"high: 3 nodes{expected}"


def test_only_root_connects_for_the_owners_of_jobs(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = shell(*CONNECT, "--as-owners")
    assert refused.code == 2
    assert "only root may submit for others, and ana@login is not root" in refused.err
    assert not (shell.home / "slurm.json").exists()
    monkeypatch.setenv("FAKE_UID", "0")
    assert "not both" in shell(*CONNECT, "--as-owners", "--as-root").err
    done = shell(*CONNECT, "--as-owners", "--system-accounts", "bot,ci")
    assert done.code == 0, done.err
    assert "jobs of all projects run under the Unix accounts of their owners" in done.out
    config = load_config(shell.home)
    assert (config.as_owners, config.system_accounts) == (True, ("bot", "ci"))


def test_ssh_options_are_used_and_saved(shell: Shell, tmp_path: Path) -> None:
    assert shell(*CONNECT, "--ssh-options=-p 2222 -i '/my key'").code == 0
    expected = (tmp_path / "said").read_text()
    assert all(line.startswith("-p 2222 -i /my key -o ") for line in expected.splitlines())
    assert all(" -- ana@login " in line for line in expected.splitlines())
    assert load_config(shell.home).ssh_options == ("-p", "2222", "-i", "/my key")


@pytest.mark.parametrize("host", ["-oProxyCommand=touch x", "ana@-oProxyCommand=touch x"])
def test_host_that_looks_like_an_ssh_option_is_refused(shell: Shell, tmp_path: Path, host: str) -> None:
    refused = shell("connect", "slurm", f"--ssh={host}", "--nodes-on", "127.0.0.1:7464")
    assert (refused.code, "starts like an option" in refused.err) == (2, True)
    assert not (tmp_path / "said").exists()


def test_config_is_written_to_the_shared_directory(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHOAL_SHARED", str(tmp_path / "shared"))
    monkeypatch.setenv("SHOAL_DATABASE_URL", "postgresql://ana@db/shoal")
    result = shell(*CONNECT, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["config"] == str(tmp_path / "shared" / "slurm.json")
    assert load_config(tmp_path / "shared").ssh == "ana@login"


HERE = ("connect", "slurm", "--as-root", "--nodes-on", "127.0.0.1:7464")


def test_paths_that_nodes_use_are_absolute(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "ana"))
    (tmp_path / "scratch").mkdir()
    paths = ("--spool=~/spool", "--python", "venv/bin/python", "--python-path", "src:/opt/shoal")
    result = shell(*HERE, "--shared", "scratch", *paths)
    assert result.code == 0, result.err
    kept = load_config(shell.home)
    assert (kept.shared, kept.spool) == (f"{tmp_path}/scratch", f"{tmp_path}/ana/spool")
    assert (kept.python, kept.python_path) == (f"{tmp_path}/venv/bin/python", f"{tmp_path}/src:/opt/shoal")
    assert shell(*HERE, "--python", "python3").code == 0
    assert load_config(shell.home).python == "python3", "found on each node"


@pytest.mark.parametrize("option", ["--shared", "--spool", "--python", "--python-path"])
def test_a_relative_path_of_other_machines_is_refused(shell: Shell, option: str) -> None:
    refused = shell(*CONNECT, option, "some/where")
    assert refused.code == 2
    assert f"`{option} some/where` is relative, and ana@login is another machine" in refused.err
    assert "name the path that the nodes see, an absolute one" in refused.err
    assert not (shell.home / "slurm.json").exists()


@pytest.mark.parametrize(
    ("arguments", "where"), [(HERE, ""), (CONNECT, " on ana@login")], ids=["here", "ssh"]
)
def test_a_shared_directory_that_is_not_there_is_refused(
    shell: Shell, tmp_path: Path, arguments: tuple[str, ...], where: str
) -> None:
    shared = tmp_path / "scrach"
    refused = shell(*arguments, "--shared", str(shared))
    assert refused.code == 2
    assert f"there is no directory {shared}{where}; make or mount it on every machine" in refused.err
    assert not shared.exists()
    assert not (shell.home / "slurm.json").exists()
    shared.mkdir()
    assert shell(*arguments, "--shared", str(shared)).code == 0
    assert load_config(shell.home).shared == str(shared)


def test_connection_is_for_one_project_without_shared_trust(shell: Shell) -> None:
    assert "jobs of project default run under the account `ana`\n" in shell(*CONNECT).out
    assert (load_config(shell.home).project, load_config(shell.home).has_shared_trust) == ("default", False)
    assert "jobs of project vision run" in shell(*CONNECT, "--project", "vision").out
    assert load_config(shell.home).project == "vision"
    assert "jobs of all projects run" in shell(*CONNECT, "--shared-trust").out
    assert load_config(shell.home).has_shared_trust


def test_partitions_are_printed_and_left_out_ones_with_the_reason(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = "PartitionName=main Default=YES MaxTime=1-00:00:00 State=UP"
    monkeypatch.setenv("PARTITIONS", f"{main}\nPartitionName=low AllowGroups=staff State=UP")
    result = shell(*CONNECT)
    assert result.code == 0, result.err
    assert "partition main (default): 1 node, up to 1440 min\n" in result.out
    assert "partition low left out: for groups staff alone\n" in result.out
    shown = shell(*CONNECT, "--json").json()
    assert [
        (partition["name"], partition["nodes"], partition["pool"]) for partition in shown["partitions"]
    ] == [("main", 1, 1)]
    assert shown["left_out"] == {"low": "for groups staff alone"}
    assert "jobs may go to main; partition `low` is left out: for groups staff alone" in check_slurm().message
    monkeypatch.setenv("PARTITIONS", f"{main.replace('UP', 'DOWN')}\nPartitionName=low AllowGroups=staff")
    finding = check_slurm()
    assert (finding.level, "partition `main` is DOWN" in finding.message) == (Level.WARN, True)
    refused = shell(*CONNECT, "--partition", "low")
    assert (refused.code, "partition `low` is left out: for groups staff alone" in refused.err) == (2, True)
    refused = shell(*CONNECT, "--partition", "main,mian")
    assert "no partition `mian`; there is low, main" in refused.err
    assert "did you mean `main`?" in refused.err


def test_accounts_and_qos_are_printed_and_must_be_the_users(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shell(*CONNECT, "--account", "anything").code == 0  # there is no accounting
    monkeypatch.setenv("ACCOUNTS", "nlp|nlp||normal|normal\nnlp|vision|main||high,normal")
    result = shell(*CONNECT, "--account", "nlp,vision=vision", "--qos", "vision=high")
    assert result.code == 0, result.err
    assert "accounts you may use: nlp (default; qos normal), vision (in main; qos high, normal)" in result.out
    kept = load_config(shell.home)
    assert (kept.account, kept.accounts, kept.default_account) == ("nlp", {"vision": "vision"}, "nlp")
    assert (kept.qos, kept.project_qos) == ("", {"vision": "high"})
    shown = shell(*CONNECT, "--json").json()
    assert [account["account"] for account in shown["accounts"]] == ["nlp", "vision"]
    for arguments, expected in (
        (("--account", "vison"), "did you mean `--account vision`?"),
        (("--account", "default=vison"), "no account `vison`; there is nlp, vision"),
        (("--qos", "hihg"), "did you mean `--qos high`?"),
        (("--account", "a,b"), "PROJECT=NAME"),
    ):
        refused = shell(*CONNECT, *arguments)
        assert (refused.code, expected in refused.err) == (2, True), refused.err


def test_progress_of_asking_slurm_goes_to_standard_error(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    done = shell(*CONNECT, "--json")
    assert (done.code, done.json()["nodes"]) == (0, 1), done.err
    assert done.err.startswith("asking Slurm for its nodes")
    assert done.err.endswith("\r\x1b[K"), "the line is gone when it is over"


def test_doctor_does_not_ask_a_slurm_that_is_not_connected(shell: Shell) -> None:
    assert check_slurm().message == "not connected"


@pytest.fixture
def rest() -> Iterator[Paper]:
    with on_paper() as server:
        for table in ("nodes", "partitions"):
            expected = (RECORDED / "v0.0.38" / f"{table}.json").read_bytes()
            server.answers[f"/slurm/v0.0.38/{table}"] = 200, expected
        yield server


def jwt_file(folder: Path, user: str, mode: int = 0o600) -> str:
    file = folder / "token"
    file.write_text(token(sun=user))
    file.chmod(mode)
    return str(file)


def test_slurmrestd_is_asked_and_its_identity_saved(shell: Shell, rest: Paper, tmp_path: Path) -> None:
    file = jwt_file(tmp_path, "ana")
    result = shell("connect", "slurm", "--rest", rest.url, "--jwt-file", file, "--nodes-on", "127.0.0.1:7464")
    assert result.code == 0, result.err
    assert "slurm 22.05.8, by REST v0.0.38: 1 of 2 nodes, 4 CPUs, 2 GPUs" in result.out
    kept = load_config(shell.home)
    assert (kept.rest, kept.jwt_file, kept.rest_uid) == (rest.url, file, os.getuid())
    assert token(sun="ana") not in (shell.home / "slurm.json").read_text()


def test_by_rest_a_shared_directory_that_this_machine_lacks_is_noted(
    shell: Shell, rest: Paper, tmp_path: Path
) -> None:
    arguments = ("connect", "slurm", "--rest", rest.url, "--jwt-file", jwt_file(tmp_path, "ana"))
    result = shell(*arguments, "--nodes-on", "127.0.0.1:7464", "--shared", str(tmp_path / "scratch"))
    assert result.code == 0, result.err
    assert f"note: there is no directory {tmp_path}/scratch on this machine" in result.err


def test_root_token_is_refused_without_as_root(shell: Shell, rest: Paper, tmp_path: Path) -> None:
    arguments = ("connect", "slurm", "--rest", rest.url, "--jwt-file", jwt_file(tmp_path, "root"))
    refused = shell(*arguments, "--nodes-on", "127.0.0.1:7464")
    assert (refused.code, "all jobs would run as root" in refused.err) == (2, True)
    assert shell(*arguments, "--nodes-on", "127.0.0.1:7464", "--rest-user", "ana").code == 0


def test_conflicting_options_are_refused(shell: Shell, rest: Paper, tmp_path: Path) -> None:
    file = jwt_file(tmp_path, "ana")
    for arguments, expected in (
        (("--rest", rest.url), "no token for"),
        (("--jwt-file", file), "without a server to send the token to"),
        (("--rest", rest.url, "--jwt-file", file, "--ssh", "ana@login"), "both `--rest"),
        (("--rest", "http://slurm.example.org", "--jwt-file", file), "in clear"),
    ):
        refused = shell("connect", "slurm", *arguments)
        assert (refused.code, expected in refused.err) == (2, True), refused.err
    assert rest.asked == []
    readable = jwt_file(tmp_path, "ana", 0o644)
    refused = shell("connect", "slurm", "--rest", rest.url, "--jwt-file", readable)
    assert (refused.code, "chmod 600" in refused.err) == (6, True)
    assert rest.asked == []


def lay_down(home: Path) -> Mailbox:
    """A home with one attempt whose task spec a node has taken."""
    mailbox = Mailbox(home, SystemClock())
    mailbox.add((slurm_task_spec(nodes=("n0",)),), None)
    mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n0", process="one"))
    return mailbox


def test_cluster_identity_is_saved(shell: Shell) -> None:
    assert shell(*CONNECT).code == 0
    config = load_config(shell.home)
    assert (config.cluster, config.heads) == ("lab", ("a",))


def test_connect_is_refused_while_jobs_may_run_on_another_cluster(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shell(*CONNECT).code == 0
    mailbox = lay_down(shell.home)
    before = (shell.home / "slurm.json").read_text()
    assert shell(*CONNECT, "--partition", "low", "--shared-trust").code == 0, "the same, otherwise"
    assert shell(*CONNECT).code == 0
    refused = shell("connect", "local")
    assert refused.code == 3
    expected = (
        "1 of this home's attempts may run on the Slurm `lab` (a), and a control plane over this machine "
        "does not know them"
    )
    assert expected in " ".join(refused.err.split())
    assert "default/7 on n0" in refused.err
    assert "shoal down --jobs" in refused.err
    assert "--same-cluster" not in refused.err
    monkeypatch.setenv("FAKE_CLUSTER", "prod")
    refused = shell(*CONNECT)
    assert refused.code == 3
    assert "a control plane over the Slurm `prod` (a) does not know them" in " ".join(refused.err.split())
    assert "--same-cluster" in refused.err
    assert (shell.home / "slurm.json").read_text() == before
    assert json.loads((shell.home / "options.json").read_text())["engine"] == "slurm"
    [share] = mailbox.tasks()
    mailbox.reap(share, EndKind.LOST, "gone")
    assert shell(*CONNECT).code == 0
    assert shell("connect", "local").code == 0


def test_renamed_cluster_is_accepted_with_same_cluster(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shell(*CONNECT).code == 0
    write_cluster(shell.home, load_config(shell.home).cluster_id)
    lay_down(shell.home)
    assert shell("connect", "local", "--same-cluster").code == 3
    monkeypatch.setenv("FAKE_CLUSTER", "prod")
    assert shell(*CONNECT, "--same-cluster").code == 0
    assert read_cluster(shell.home) == load_config(shell.home).cluster_id


def test_older_home_knows_its_cluster_by_its_address(shell: Shell) -> None:
    assert shell(*CONNECT).code == 0
    config = msgspec.structs.replace(load_config(shell.home), cluster="", heads=())
    (shell.home / "slurm.json").write_bytes(msgspec.json.encode(config))
    lay_down(shell.home)
    assert shell("connect", "local").code == 3
    assert shell(*(word.replace("login", "other") for word in CONNECT)).code == 3
    assert shell(*CONNECT).code == 0


def test_connect_is_refused_while_jobs_run_on_this_machine(shell: Shell) -> None:
    SpoolIndex(shell.home).add((slurm_task_spec(nodes=("n0",)),), None)
    refused = shell(*CONNECT)
    assert (refused.code, "may run on this machine" in " ".join(refused.err.split())) == (3, True)
    assert not (shell.home / "slurm.json").exists()
    assert shell("connect", "local").code == 0
