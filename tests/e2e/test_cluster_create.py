"""From bare machines to a Slurm and back: real sshds, munge, MariaDB, slurmdbd, slurmctld and slurmds.

Each machine is a set of namespaces on this one (`tests/support/machines.py`), without systemd.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.style.tree import ROOT
from tests.support.machines import Lab, machines, missing

pytestmark = [
    pytest.mark.engines,
    pytest.mark.serial,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing"),
]

WITH_GPUS = 'for i in 0 1; do mknod -m 666 "/dev/nvidia$i" c 240 "$i"; done'
WITHOUT_ARCHIVES = """\
dpkg --purge --force-all slurmd >/dev/null 2>&1
rm -rf /etc/apt/sources.list* /var/lib/apt/lists/*
"""
BROKEN_SLURMD = "chmod -x /usr/sbin/slurmd"
FOREIGN_KEY = """\
head -c 512 /dev/urandom >/etc/munge/munge.key
chown munge:munge /etc/munge/munge.key
chmod 400 /etc/munge/munge.key
"""


@dataclass
class Desk:
    """Where somebody sits and types `shoal cluster`."""

    lab: Lab
    home: Path

    def run(self, *words: str, code: int) -> subprocess.CompletedProcess[str]:
        """Type a command. It must end with this exit code."""
        done = subprocess.run(
            [sys.executable, "-m", "shoal.cli.main", "cluster", *words],
            env={**os.environ, "SHOAL_HOME": str(self.home), "COLUMNS": "200"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        tail = (done.stdout + done.stderr)[-4000:]
        wrong = [line for line in done.stdout.splitlines() if "FAILED" in line or '"detail": "' in line]
        assert done.returncode == code, (
            f"{words}: {done.returncode}: {[w for w in wrong if len(w) > 30]} {tail}"
        )
        return done

    def type(self, *words: str, code: int = 0) -> str:
        done = self.run(*words, code=code)
        return done.stdout + done.stderr

    def ask(self, *words: str, code: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run(*words, "--json", code=code).stdout)
        return found

    def create(self, *names: str, code: int = 0, more: tuple[str, ...] = ()) -> dict[str, Any]:
        return self.ask("create", *self.reach(*names), *more, code=code)

    def reach(self, *names: str) -> tuple[str, ...]:
        hosts = ",".join(self.lab.address(name) for name in names)
        known = str(self.lab.known_hosts)
        key = str(self.lab.identity)
        return (
            "--hosts",
            hosts,
            "--name",
            "lab",
            "--user",
            "root",
            "--identity",
            key,
            "--known-hosts",
            known,
        )

    def states(self, controller: str = "node-a") -> dict[str, str]:
        """Slurm's own word about each node."""
        lines = self.lab.ssh(controller, "sinfo -h -N -p main -o '%N %t'").stdout.splitlines()
        return dict(line.split() for line in lines)

    def await_states(self, wanted: dict[str, str]) -> None:
        deadline = time.monotonic() + 90
        while (seen := self.states()) != wanted:
            assert time.monotonic() < deadline, seen
            time.sleep(0.5)

    def as_user(self, command: str) -> str:
        """A command of Slurm's by a user that every machine has: root's jobs are refused."""
        typed = shlex.quote(f"cd / && {command}")
        return self.lab.ssh("node-a", f"su -s /bin/sh nobody -c {typed}").stdout

    def srun(self, flags: str, command: str = "hostname") -> list[str]:
        return sorted(self.as_user(f"srun {flags} {command}").split())


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with machines(tmp_path / "lab") as lab:
        yield Desk(lab, tmp_path / "home")


def pids(lab: Lab, name: str) -> list[str]:
    return lab.ssh(name, "cat /run/*.pid /run/munge/*.pid /run/mysqld/*.pid 2>/dev/null; true").stdout.split()


def traces(lab: Lab, name: str) -> list[str]:
    """What a cluster leaves on a machine."""
    paths = "/var/lib/shoal-cluster /etc/munge/munge.key /etc/slurm/*.conf /usr/local/sbin/shoal-*"
    paths += " /run/slurm*.pid"
    look = f"ls -d {paths} 2>/dev/null"
    running = "pgrep -l 'slurm|munge' || true"
    hosts = "grep shoal /etc/hosts || true"
    return lab.ssh(name, f"{look}; {running}; {hosts}").stdout.split()


def test_four_machines_become_a_cluster_change_and_are_themselves_again(desk: Desk) -> None:
    lab = desk.lab
    for name in ("node-a", "node-b"):
        lab.start(name)
    lab.start("node-c", BROKEN_SLURMD)
    names = ("node-a", "node-b", "node-c")

    a_dry_run_tells_all_and_changes_nothing(desk, names)
    one_machine_fails_half_way_and_the_rest_works(desk, names)

    lab.ssh("node-c", "chmod +x /usr/sbin/slurmd")
    mended = desk.create(*names)
    assert {step["name"] for step in mended["steps"] if step["state"] == "changed"} == {"node-c"}
    desk.await_states(dict.fromkeys(names, "idle"))
    assert desk.srun("-N3") == list(names)

    before = [pids(lab, name) for name in names]
    assert "nothing to change" in desk.type("create", *desk.reach(*names))
    again = desk.ask("create")
    assert (again["num_changed"], again["failed"]) == (0, [])
    assert len(again["steps"]) > 40
    assert [pids(lab, name) for name in names] == before

    a_machine_with_gpus_is_added_under_a_running_job(desk)
    a_machine_that_cannot_be_made_ready_stays_out(desk)
    machines_leave_dead_or_alive(desk)

    lab.ssh("node-a", "touch /etc/slurm/mine")
    down = desk.ask("destroy", "--yes")
    assert down["inventory"] is None
    assert [traces(lab, name) for name in ("node-a", "node-b")] == [[], []]
    assert lab.ssh("node-a", "ls /etc/slurm").stdout.split() == ["mine"]
    assert lab.ssh("node-a", "ls -d /var/lib/mysql/slurm_acct", check=False).returncode != 0
    assert "no cluster yet" in desk.type()


def a_dry_run_tells_all_and_changes_nothing(desk: Desk, names: tuple[str, ...]) -> None:
    text = desk.type("create", *desk.reach(*names), "--dry-run")
    assert "    | ClusterName=lab" in text
    assert "    | (1024 secret bytes)" in text
    assert "/usr/sbin/slurmctld" in text
    assert "StoragePass" not in text
    assert [traces(desk.lab, name) for name in names] == [[], [], []]
    assert "no cluster yet" in desk.type()


def one_machine_fails_half_way_and_the_rest_works(desk: Desk, names: tuple[str, ...]) -> None:
    made = desk.create(*names, code=5)
    (wrong,) = [step for step in made["steps"] if step["state"] == "failed"]
    assert made["failed"] == [desk.lab.address("node-c")]
    assert wrong["title"].startswith("slurmd runs")
    assert "ermission denied" in wrong["detail"]
    states = desk.states()
    assert (states["node-a"], states["node-b"]) == ("idle", "idle")
    assert states["node-c"] != "idle"
    assert desk.srun("-N2") == ["node-a", "node-b"]
    modes = "stat -c '%a %U:%G' /etc/munge/munge.key /etc/slurm/slurmdbd.conf"
    assert desk.lab.ssh("node-a", modes).stdout.splitlines() == ["400 munge:munge", "600 slurm:slurm"]


def a_machine_with_gpus_is_added_under_a_running_job(desk: Desk) -> None:
    lab = desk.lab
    lab.start("node-d", WITH_GPUS)
    desk.as_user("sbatch -J keep -w node-b -o /dev/null --wrap 'sleep 600'")
    added = desk.ask("add", lab.address("node-d"), "--switch", "rack2")
    assert added["failed"] == []
    desk.await_states({"node-a": "idle", "node-b": "mix", "node-c": "idle", "node-d": "idle"})
    assert lab.ssh("node-a", "squeue -h -n keep -o '%T %r'").stdout.split()[0] == "RUNNING"
    lab.ssh("node-a", "scancel -n keep")
    assert desk.srun("-p gpu --gres=gpu:2", "sh -c 'echo $SLURMD_NODENAME:$CUDA_VISIBLE_DEVICES'") == [
        "node-d:0,1"
    ]
    assert "SwitchName=rack2 Level=0" in lab.ssh("node-a", "scontrol show topology").stdout
    assert desk.ask("add", lab.address("node-d"))["num_changed"] == 0
    the_health_check_drains_a_node_that_lost_a_gpu_and_takes_it_back(desk)


def the_health_check_drains_a_node_that_lost_a_gpu_and_takes_it_back(desk: Desk) -> None:
    lab = desk.lab
    health = "/usr/local/sbin/shoal-node-health"
    assert lab.ssh("node-d", f"rm /dev/nvidia1; {health}", check=False).returncode == 1
    assert desk.states()["node-d"].startswith("drain")
    assert "shoal: /dev/nvidia1 is gone" in lab.ssh("node-a", "scontrol show node node-d").stdout
    lab.ssh("node-d", f"mknod -m 666 /dev/nvidia1 c 240 1; {health}")
    desk.await_states(dict.fromkeys(("node-a", "node-b", "node-c", "node-d"), "idle"))


def a_machine_that_cannot_be_made_ready_stays_out(desk: Desk) -> None:
    desk.lab.start("node-e", WITHOUT_ARCHIVES)
    refused = desk.ask("add", desk.lab.address("node-e"), code=5)
    assert refused["failed"] == [desk.lab.address("node-e")]
    assert [step["title"].split()[0] for step in refused["steps"] if step["state"] == "failed"] == [
        "packages"
    ]
    assert {host["address"] for host in refused["inventory"]["hosts"]} == {
        desk.lab.address(name) for name in ("node-a", "node-b", "node-c", "node-d")
    }
    assert "node-e" not in desk.states()


def machines_leave_dead_or_alive(desk: Desk) -> None:
    lab = desk.lab
    desk.as_user("sbatch -J busy -w node-d -o /dev/null --wrap 'sleep 600'")
    deadline = time.monotonic() + 60
    while desk.states()["node-d"] == "idle":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    busy = desk.ask("remove", "node-d", code=5)
    assert "run there" in next(step["detail"] for step in busy["steps"] if step["state"] == "failed")
    lab.ssh("node-a", "scancel -n busy; scontrol update nodename=node-d state=resume")
    lab.stop("node-c")
    gone = desk.ask("remove", "node-c")
    assert [line for line in gone["remarks"] if line.startswith(("node-c", lab.address("node-c")))] != []
    desk.ask("remove", "node-d")
    desk.await_states({"node-a": "idle", "node-b": "idle"})
    assert traces(lab, "node-d") == []
    assert desk.srun("-N2") == ["node-a", "node-b"]


def test_a_munge_key_that_was_there_before_is_refused_kept_or_put_aside(desk: Desk) -> None:
    lab = desk.lab
    lab.start("node-a", FOREIGN_KEY)
    lab.start("node-b")
    look = "sha256sum </etc/munge/munge.key"
    theirs = lab.ssh("node-a", look).stdout
    text = desk.type("create", *desk.reach("node-a", "node-b"), code=5)
    assert "/etc/munge/munge.key that was there before Shoal" in text
    assert traces(lab, "node-b") == []

    kept = desk.create("node-a", "node-b", more=("--existing", "keep"))
    assert kept["failed"] == []
    assert lab.ssh("node-b", look).stdout == theirs
    assert desk.ask("create")["num_changed"] == 0
    desk.ask("destroy", "--yes")
    assert lab.ssh("node-a", look).stdout == theirs
    assert lab.ssh("node-b", look, check=False).returncode != 0

    desk.create("node-a", "node-b", more=("--existing", "replace"))
    assert lab.ssh("node-a", look).stdout != theirs
    desk.ask("destroy", "--yes")
    assert lab.ssh("node-a", look).stdout == theirs


def test_a_host_key_is_believed_only_when_it_is_known_or_new_ones_are_accepted(desk: Desk) -> None:
    lab = desk.lab
    lab.start("node-a")
    line = lab.known_hosts.read_text()
    lab.known_hosts.write_text("")
    reach = (*desk.reach("node-a"), "--dry-run")
    text = desk.type("create", *reach, code=5)
    assert "knows none for it" in text
    assert "--accept-new-host-keys" in text
    desk.type("create", *reach, "--accept-new-host-keys")
    assert lab.known_hosts.read_text() == line
    other = (lab.folder / "id.pub").read_text().split()
    lab.known_hosts.write_text(f"{lab.address('node-a')} {other[0]} {other[1]}\n")
    text = desk.type("create", *reach, "--accept-new-host-keys", code=5)
    assert "shows another host key" in text


def test_machines_are_reached_through_a_jump_host_by_a_user_who_may_sudo(desk: Desk) -> None:
    lab = desk.lab
    lab.start("node-a")
    lab.start("node-b")
    lab.ssh("node-b", "useradd -m -s /bin/sh ana && usermod -p '*' ana")
    jump = ("--jump", f"root@{lab.address('node-a')}")
    reach = [word if word != "root" else "ana" for word in desk.reach("node-b")]
    text = desk.type("create", *reach, *jump, "--dry-run", code=5)
    assert "sudo" in text
    lab.ssh("node-b", "command -v sudo >/dev/null && echo 'ana ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/ana")
    dry = desk.ask("create", *reach, *jump, "--dry-run")
    assert dry["failed"] == []
    assert {step["state"] for step in dry["steps"]} >= {"would change"}
