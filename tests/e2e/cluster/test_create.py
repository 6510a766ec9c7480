"""From bare machines to a finished job and back: real sshds, munge, MariaDB, slurmdbd, slurmctld and slurmds.

Each machine is a set of namespaces on this one (`tests/support/host/machines.py`), without systemd. One story
tells all that needs a cluster: every making of one costs half a minute. What happens to a cluster later is
in `test_cluster_changes.py`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.style.tree import ROOT
from tests.support.host.admin_shell import (
    ANA,
    BEHIND_UFW,
    SUDO,
    WITH_GPUS,
    AdminShell,
    admin_shell,
    cluster_traces,
    daemon_pids,
)
from tests.support.host.machines import missing_programs

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing_programs()), reason=missing_programs() or "nothing is missing"),
]

GUIDE = ROOT / "docs" / "guides" / "cluster.md"
NAMES = ("node-a", "node-b", "node-c", "node-d")
BROKEN_SLURMD = "chmod -x /usr/sbin/slurmd\n"


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[AdminShell]:
    with admin_shell(tmp_path) as desk:
        yield desk


def test_four_bare_machines_become_a_cluster_that_works_and_are_themselves_again(desk: AdminShell) -> None:
    lab = desk.lab
    more = {"node-b": BEHIND_UFW, "node-c": BROKEN_SLURMD}
    for name in NAMES:
        lab.start(name, ANA + SUDO + more.get(name, ""))
    hosts = lab.ssh("node-a", "cat /etc/hosts").stdout

    dry = desk.run_cluster_json("create", *desk.host_options(*NAMES), "--dry-run")
    assert [cluster_traces(lab, name) for name in NAMES] == [[]] * 4
    assert "no cluster yet" in desk.run_cluster()
    created = desk.run_cluster_json("create", *desk.host_options(*NAMES), code=5)
    a_dry_run_told_what_was_done(dry, created)
    one_machine_failed_half_way_and_the_rest_works(desk, created)

    lab.ssh("node-c", "chmod +x /usr/sbin/slurmd")
    desk.run("up", code=0)
    mended = desk.run_cluster_json("create", "--shared", "/srv/shared")
    a_shoal_that_is_up_takes_the_shared_directory_up(desk)
    changed = {step["name"] for step in mended["steps"] if step["state"] == "changed"}
    assert changed == {"node-a", "node-c"}  # node-a: the mark in /srv/shared
    desk.wait_for_states(dict.fromkeys(NAMES, "idle"))

    before = [daemon_pids(lab, name) for name in NAMES]
    assert "nothing to change" in desk.run_cluster("create", *desk.host_options(*reversed(NAMES)))
    assert [daemon_pids(lab, name) for name in NAMES] == before
    a_job_on_two_nodes_finishes_with_shoal(desk)
    a_machine_with_gpus_is_added_under_a_running_job(desk)
    the_health_check_drains_a_node_that_lost_a_gpu_and_takes_it_back(desk)

    lab.ssh("node-a", "scancel -n keep")
    down = desk.run_cluster_json("destroy", "--yes")
    assert down["inventory"] is None
    assert [cluster_traces(lab, name) for name in (*NAMES, "node-e")] == [[]] * 5
    assert not (lab.shared / ".shoal-cluster").exists()
    assert lab.ssh("node-a", "cat /etc/hosts").stdout == hosts
    assert lab.ssh("node-a", "ls -d /var/lib/mysql/slurm_acct", check=False).returncode != 0
    assert "no cluster yet" in desk.run_cluster()


def a_dry_run_told_what_was_done(dry: dict[str, Any], created: dict[str, Any]) -> None:
    """Every step of every machine, in its order, with its command and its file. Secrets are made anew."""

    def shown(report: dict[str, Any], name: str) -> list[tuple[object, ...]]:
        steps = [step for step in report["steps"] if step["name"] == name and step["state"] != "unchanged"]
        return [
            (step["title"], re.sub(r"\b[0-9a-f]{32,}\b", "#", step["command"]), step.get("file"))
            for step in steps
            if not step["title"].endswith("answers the controller")  # who answers at once is not waited for
        ]

    for name in NAMES:
        report, done = shown(dry, name), shown(created, name)
        assert done == (report[: len(done)] if name == "node-c" else report)
    there = {step["title"].split()[0] for step in dry["steps"] if step["state"] == "unchanged"}
    assert there == {"packages"}
    files = {step["file"]["path"]: step["file"]["content"] for step in dry["steps"] if step.get("file")}
    assert "ClusterName=lab\n" in files["/etc/slurm/slurm.conf"]
    assert files["/etc/munge/munge.key"] is None
    assert files["/etc/slurm/slurmdbd.conf"] is None


def one_machine_failed_half_way_and_the_rest_works(desk: AdminShell, created: dict[str, Any]) -> None:
    (wrong,) = [step for step in created["steps"] if step["state"] == "failed"]
    assert created["failed"] == [desk.lab.address("node-c")]
    assert wrong["title"].startswith("slurmd runs")
    assert "ermission denied" in wrong["detail"]
    address = desk.lab.address
    advice = f"on node-b: ufw allow proto tcp from {address('node-a')} to any port 60001:63000,6818"
    assert advice in created["firewall"]
    states = desk.node_states()
    assert states.pop("node-c") != "idle"
    assert states == {"node-a": "idle", "node-b": "idle", "node-d": "idle"}
    assert desk.srun("-N3") == ["node-a", "node-b", "node-d"]
    modes = "stat -c '%a %U:%G' /etc/munge/munge.key /etc/slurm/slurmdbd.conf"
    assert desk.lab.ssh("node-a", modes).stdout.splitlines() == ["400 munge:munge", "600 slurm:slurm"]
    # The database is nobody else's to ask.
    listening = desk.lab.ssh("node-a", "ss -Hltn 'sport = 3306'").stdout.split()
    assert listening[3] == "127.0.0.1:3306"


def a_shoal_that_is_up_takes_the_shared_directory_up(desk: AdminShell) -> None:
    job = desk.home.parent / "keeps" / "job.yaml"
    job.parent.mkdir()
    job.write_text('name: keeps\nrun: test -d "$SHOAL_CHECKPOINT_DIR"\ncheckpoint: {}\n')
    deadline = time.monotonic() + 60
    while (done := desk.run_unchecked("run", str(job))).returncode != 0:
        assert "no directory that all nodes share" in done.stderr, done.stdout + done.stderr
        assert time.monotonic() < deadline
        time.sleep(1)


def a_job_on_two_nodes_finishes_with_shoal(desk: AdminShell) -> None:
    """The guide's own. `create` has connected Shoal; names lead to the machines, not to loopback."""
    work = desk.home.parent / "work"
    work.mkdir()
    (program,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (work / "two.py").write_text(program)
    arguments = ("run", "--nodes", "2", "--workdir", str(work), "--", "/usr/bin/python3", "two.py")
    text = desk.run(*arguments, code=0).stdout
    assert any(f" met {name} at {desk.lab.address(name)}" in text for name in NAMES), text
    a_machine_that_leaves_is_off_the_list_of_shoal_at_once(desk)
    desk.run("down", code=0)


def a_machine_that_leaves_is_off_the_list_of_shoal_at_once(desk: AdminShell) -> None:
    """And is refused, without a trace, while a job runs there."""
    drains = "grep -c 'update_node: node node-d reason set to: leaves' /var/log/slurm/slurmctld.log || true"
    job = desk.as_user("sbatch --parsable -w node-d -o /dev/null --wrap 'sleep 600'").strip()
    is_running = f"squeue -h -j {job} -t running -o %i | grep -q ."
    desk.lab.ssh("node-a", f"timeout 60 sh -c 'until {is_running}; do sleep 0.2; done'")
    refused = desk.run_cluster("remove", "node-d", code=5)
    assert f"refused: node-d: Slurm's job {job} runs there" in refused
    assert "cluster lab: stopped; nothing was changed" in refused
    assert desk.lab.ssh("node-a", drains).stdout.strip() == "0"
    desk.lab.ssh("node-a", f"scancel {job}")
    assert "shoal nodes remove" not in desk.run_cluster("remove", "node-d")
    assert desk.lab.ssh("node-a", drains).stdout.strip() != "0"
    assert "node-d" not in desk.run("nodes", code=0).stdout
    desk.run_cluster_json("add", desk.lab.address("node-d"))
    desk.wait_for_states(dict.fromkeys(NAMES, "idle"))


def a_machine_with_gpus_is_added_under_a_running_job(desk: AdminShell) -> None:
    lab = desk.lab
    desk.as_user("sbatch -J keep -w node-b -o /dev/null --wrap 'sleep 600'")
    # Slurm drains a node whose job begins while slurmctld is restarted ("batch job complete failure").
    lab.ssh("node-b", "timeout 60 sh -c 'until pgrep -u ana -x sleep >/dev/null; do sleep 0.2; done'")
    lab.start("node-e", ANA + SUDO + WITH_GPUS)
    added = desk.run_cluster_json("add", lab.address("node-e"), "--switch", "rack2")
    assert added["failed"] == []
    desk.wait_for_states({**dict.fromkeys(NAMES, "idle"), "node-b": "mix", "node-e": "idle"})
    assert lab.ssh("node-a", "squeue -h -n keep -o %T").stdout.split() == ["RUNNING"]
    show = "sh -c 'echo $SLURMD_NODENAME:$CUDA_VISIBLE_DEVICES'"
    assert desk.srun("-p gpu --gres=gpu:h200:2", show) == ["node-e:0,1"]
    assert "SwitchName=rack2 Level=0" in lab.ssh("node-a", "scontrol show topology").stdout
    a_job_has_what_it_asked_for_and_no_more(desk)


def a_job_has_what_it_asked_for_and_no_more(desk: AdminShell) -> None:
    """By cgroups: a GPU that is another's cannot be opened, and memory beyond one's own is not had."""
    tries = "sh -c 'for i in 1 3; do LC_ALL=C cat /dev/nvidia$i 2>&1; done; true'"
    lines = desk.as_user(f"srun -p gpu --gres=gpu:1 {tries}").splitlines()
    assert sorted(line.rpartition(": ")[2] for line in lines) == [
        "No such device or address",  # its own, behind which there is no driver
        "Operation not permitted",
    ]
    grow = "/usr/bin/python3 -c 'bytearray(300 << 20)'"
    assert desk.as_user(f"srun --mem=600 {grow}; echo $?").split()[-1] == "0"
    assert desk.as_user(f"srun --mem=100 {grow} 2>/dev/null; echo $?").split()[-1] != "0"


def the_health_check_drains_a_node_that_lost_a_gpu_and_takes_it_back(desk: AdminShell) -> None:
    lab = desk.lab
    health = "/usr/local/sbin/shoal-node-health"
    assert lab.ssh("node-e", f"rm /dev/nvidia1; {health}", check=False).returncode == 1
    assert desk.node_states()["node-e"].startswith("drain")
    assert "shoal: /dev/nvidia1 is gone" in lab.ssh("node-a", "scontrol show node node-e").stdout
    lab.ssh("node-e", f"mknod -m 666 /dev/nvidia1 c 240 1; {health}")
    desk.wait_for_states({**dict.fromkeys(NAMES, "idle"), "node-b": "mix", "node-e": "idle"})


def test_machines_are_reached_by_keys_that_are_known_through_a_jump_host_by_a_user_who_may_sudo(
    desk: AdminShell,
) -> None:
    lab = desk.lab
    lab.start("node-a", ANA)
    line = lab.known_hosts.read_text()
    lab.known_hosts.write_text("")
    reach = (*desk.host_options("node-a"), "--dry-run")
    text = desk.run_cluster("create", *reach, code=5)
    assert "knows none for it" in text
    assert "--accept-new-host-keys" in text
    text = desk.run_cluster("create", *reach, "--accept-new-host-keys", code=5)
    assert "sudo" in text
    assert lab.known_hosts.read_text() == line
    lab.ssh("node-a", SUDO)
    dry = desk.run_cluster_json("create", *reach, "--jump", f"root@{lab.address('node-a')}")
    assert dry["failed"] == []
    assert {step["state"] for step in dry["steps"]} >= {"would change"}
    other = (lab.folder / "id.pub").read_text().split()
    lab.known_hosts.write_text(f"{lab.address('node-a')} {other[0]} {other[1]}\n")
    text = desk.run_cluster("create", *reach, "--accept-new-host-keys", code=5)
    assert "shows another host key" in text
