"""From bare machines to a finished job and back: real sshds, munge, MariaDB, slurmdbd, slurmctld and slurmds.

Each machine is a set of namespaces on this one (`tests/support/machines.py`), without systemd. One story
tells all that needs a cluster: every making of one costs half a minute.
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

ANA = """\
useradd -m -s /bin/sh -u 4242 ana
usermod -p '*' ana
"""
SUDO = """\
echo 'ana ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/ana
chmod 440 /etc/sudoers.d/ana
"""
WITH_GPUS = 'for i in 0 1; do mknod -m 666 "/dev/nvidia$i" c 240 "$i"; done\n'
WITHOUT_ARCHIVES = """\
dpkg --purge --force-all slurmd >/dev/null 2>&1
rm -rf /etc/apt/sources.list* /var/lib/apt/lists/*
"""
BROKEN_SLURMD = "chmod -x /usr/sbin/slurmd\n"
FOREIGN_KEY = """\
head -c 512 /dev/urandom >/etc/munge/munge.key
chown munge:munge /etc/munge/munge.key
chmod 400 /etc/munge/munge.key
"""
KEY_LOOK = "sudo sha256sum /etc/munge/munge.key"
NEWER_SLURMD = """\
mkdir -p /tmp/deb/DEBIAN /var/local/archive
dpkg-query -s slurmd | sed -e '/^Status:/d' -e '/^Conffiles:/,/^[A-Z]/{/^Conffiles:/d;/^ /d}' \\
  -e 's/^Version: .*/&+shoal1/' >/tmp/deb/DEBIAN/control
dpkg -L slurmd | while read -r path; do
  if [ -d "$path" ]; then mkdir -p "/tmp/deb$path"; else cp -p "$path" "/tmp/deb$path" || true; fi
done
dpkg-deb -Znone -b /tmp/deb /var/local/archive/slurmd.deb >/dev/null
cd /var/local/archive
{ cat /tmp/deb/DEBIAN/control
  echo "Filename: ./slurmd.deb"
  echo "Size: $(stat -c %s slurmd.deb)"
  echo "SHA256: $(sha256sum <slurmd.deb | cut -d' ' -f1)"; } >Packages
"""
"""An archive with the slurmd that is installed, under a version that is newer."""
ARCHIVE = """\
rm -rf /etc/apt/sources.list* /var/lib/apt/lists/*
echo 'deb [trusted=yes] file:/var/local/archive ./' >/etc/apt/sources.list
"""
PROGRAM = """\
import os, socket, time
rank, place = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
own = socket.gethostbyname(socket.gethostname())
if rank == 0:
    peer, _ = socket.create_server(("", place[1])).accept()
    print("met", peer.makefile().readline().strip(), flush=True)
for _ in range(600):
    if rank == 0:
        break
    try:
        socket.create_connection(place).sendall(f"{socket.gethostname()} at {own}\\n".encode())
        break
    except OSError:
        time.sleep(0.1)
"""


@dataclass
class Desk:
    """Where somebody sits and types `shoal`."""

    lab: Lab
    home: Path
    theirs: str = ""
    """The munge key that node-d had before."""

    def run(self, *words: str, code: int) -> subprocess.CompletedProcess[str]:
        """Type a command. It must end with this exit code."""
        done = subprocess.run(
            [sys.executable, "-m", "shoal.cli.main", *words],
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
        done = self.run("cluster", *words, code=code)
        return done.stdout + done.stderr

    def ask(self, *words: str, code: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("cluster", *words, "--json", code=code).stdout)
        return found

    def reach(self, *names: str, user: str = "ana") -> tuple[str, ...]:
        hosts = ",".join(self.lab.address(name) for name in names)
        known, key = str(self.lab.known_hosts), str(self.lab.identity)
        words = ("--hosts", hosts, "--name", "lab", "--user", user)
        return (*words, "--identity", key, "--known-hosts", known)

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
        return self.lab.ssh("node-a", f"su -s /bin/sh ana -c {typed}").stdout

    def srun(self, flags: str, command: str = "hostname") -> list[str]:
        return sorted(self.as_user(f"srun {flags} {command}").split())


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    tmp_path.chmod(0o755)
    with machines(tmp_path / "lab") as lab:
        desk = Desk(lab, tmp_path / "home")
        try:
            yield desk
        finally:
            desk.run("down", code=0)


def pids(lab: Lab, name: str) -> list[str]:
    return lab.ssh(name, "cat /run/*.pid /run/munge/*.pid /run/mysqld/*.pid 2>/dev/null; true").stdout.split()


def traces(lab: Lab, name: str) -> list[str]:
    """What a cluster leaves on a machine."""
    paths = "/var/lib/shoal-cluster /etc/munge/munge.key /etc/slurm/*.conf /usr/local/sbin/shoal-*"
    paths += " /run/slurm*.pid /usr/local/lib/shoal-node*"
    look = f"ls -d {paths} 2>/dev/null"
    running = "pgrep -l 'slurm|munge' || true"
    hosts = "grep shoal /etc/hosts || true"
    return lab.ssh(name, f"{look}; {running}; {hosts}").stdout.split()


def test_four_machines_become_a_cluster_change_and_are_themselves_again(desk: Desk) -> None:
    lab = desk.lab
    lab.start("node-a", ANA + SUDO + FOREIGN_KEY)
    lab.start("node-b", ANA + SUDO + NEWER_SLURMD)
    lab.start("node-c", ANA + SUDO + BROKEN_SLURMD)
    names = ("node-a", "node-b", "node-c")
    key = lab.ssh("node-a", KEY_LOOK).stdout
    hosts = lab.ssh("node-a", "cat /etc/hosts").stdout

    a_dry_run_tells_all_and_changes_nothing(desk, names)
    a_key_that_was_there_before_is_refused_or_kept(desk, names)
    one_machine_failed_half_way_and_the_rest_works(desk)

    lab.ssh("node-c", "chmod +x /usr/sbin/slurmd")
    mended = desk.ask("create", "--shared", "/srv/shared")
    changed = {step["name"] for step in mended["steps"] if step["state"] == "changed"}
    assert changed == {"node-a", "node-c"}  # node-a: the mark in /srv/shared
    desk.await_states(dict.fromkeys(names, "idle"))

    before = [pids(lab, name) for name in names]
    assert "nothing to change" in desk.type("create", *desk.reach(*names))
    assert [pids(lab, name) for name in names] == before
    a_job_on_two_nodes_finishes_with_shoal(desk)

    desk.as_user("sbatch -J keep -w node-b -o /dev/null --wrap 'sleep 600'")
    a_machine_with_gpus_is_added_under_a_running_job(desk)
    a_machine_that_cannot_be_made_ready_stays_out(desk)
    newer_packages_are_installed_under_a_running_job(desk)
    machines_leave_dead_or_alive(desk)

    lab.ssh("node-a", "touch /etc/slurm/mine")
    down = desk.ask("destroy", "--yes")
    assert down["inventory"] is None
    assert traces(lab, "node-b") == []
    assert not (lab.shared / ".shoal-cluster").exists()
    assert lab.ssh("node-a", KEY_LOOK).stdout == key
    assert lab.ssh("node-a", "cat /etc/hosts").stdout == hosts
    assert lab.ssh("node-a", "ls /etc/slurm").stdout.split() == ["mine"]
    assert lab.ssh("node-a", "ls -d /var/lib/mysql/slurm_acct", check=False).returncode != 0
    assert "no cluster yet" in desk.type()


def a_dry_run_tells_all_and_changes_nothing(desk: Desk, names: tuple[str, ...]) -> None:
    text = desk.type("create", *desk.reach(*names), "--existing", "replace", "--dry-run")
    assert "    | ClusterName=lab" in text
    assert "    | (1024 secret bytes)" in text
    assert "/usr/sbin/slurmctld" in text
    assert "StoragePass" not in text
    assert [traces(desk.lab, name) for name in names[1:]] == [[], []]
    assert "no cluster yet" in desk.type()


def a_key_that_was_there_before_is_refused_or_kept(desk: Desk, names: tuple[str, ...]) -> None:
    text = desk.type("create", *desk.reach(*names), code=5)
    assert "/etc/munge/munge.key that was there before Shoal" in text
    assert traces(desk.lab, "node-b") == []
    made = desk.ask("create", *desk.reach(*names), "--existing", "keep", code=5)
    (wrong,) = [step for step in made["steps"] if step["state"] == "failed"]
    assert made["failed"] == [desk.lab.address("node-c")]
    assert wrong["title"].startswith("slurmd runs")
    assert "ermission denied" in wrong["detail"]
    keys = {desk.lab.ssh(name, KEY_LOOK).stdout for name in names}
    assert len(keys) == 1


def one_machine_failed_half_way_and_the_rest_works(desk: Desk) -> None:
    states = desk.states()
    assert (states["node-a"], states["node-b"]) == ("idle", "idle")
    assert states["node-c"] != "idle"
    assert desk.srun("-N2") == ["node-a", "node-b"]
    modes = "stat -c '%a %U:%G' /etc/munge/munge.key /etc/slurm/slurmdbd.conf"
    assert desk.lab.ssh("node-a", modes).stdout.splitlines() == ["400 munge:munge", "600 slurm:slurm"]
    # The database is nobody else's to ask.
    listening = desk.lab.ssh("node-a", "ss -Hltn 'sport = 3306'").stdout.split()
    assert listening[3] == "127.0.0.1:3306"


def a_job_on_two_nodes_finishes_with_shoal(desk: Desk) -> None:
    """`create` has connected it, as the user who logged in; names lead to the machines, not to loopback."""
    desk.run("up", code=0)
    work = desk.home.parent / "work"
    work.mkdir()
    (work / "two.py").write_text(PROGRAM)
    words = ("run", "--nodes", "2", "--workdir", str(work), "--", "/usr/bin/python3", "two.py")
    text = desk.run(*words, code=0).stdout
    lab = desk.lab
    assert any(f"met {name} at {lab.address(name)}" in text for name in ("node-a", "node-b", "node-c")), text
    desk.run("down", code=0)


def a_machine_with_gpus_is_added_under_a_running_job(desk: Desk) -> None:
    """And one that has a key of its own: `--existing replace` puts it aside until the machine leaves."""
    lab = desk.lab
    lab.start("node-d", ANA + SUDO + WITH_GPUS + FOREIGN_KEY)
    refused = desk.ask("add", lab.address("node-d"), code=5)
    assert refused["failed"] == [lab.address("node-d")]
    desk.theirs = lab.ssh("node-d", KEY_LOOK).stdout
    added = desk.ask("add", lab.address("node-d"), "--switch", "rack2", "--existing", "replace")
    assert added["failed"] == []
    desk.await_states({"node-a": "idle", "node-b": "mix", "node-c": "idle", "node-d": "idle"})
    assert desk.srun("-p gpu --gres=gpu:2", "sh -c 'echo $SLURMD_NODENAME:$CUDA_VISIBLE_DEVICES'") == [
        "node-d:0,1"
    ]
    assert "SwitchName=rack2 Level=0" in lab.ssh("node-a", "scontrol show topology").stdout
    the_health_check_drains_a_node_that_lost_a_gpu_and_takes_it_back(desk)


def the_health_check_drains_a_node_that_lost_a_gpu_and_takes_it_back(desk: Desk) -> None:
    lab = desk.lab
    health = "/usr/local/sbin/shoal-node-health"
    assert lab.ssh("node-d", f"rm /dev/nvidia1; {health}", check=False).returncode == 1
    assert desk.states()["node-d"].startswith("drain")
    assert "shoal: /dev/nvidia1 is gone" in lab.ssh("node-a", "scontrol show node node-d").stdout
    lab.ssh("node-d", f"mknod -m 666 /dev/nvidia1 c 240 1; {health}")
    desk.await_states({"node-a": "idle", "node-b": "mix", "node-c": "idle", "node-d": "idle"})


def a_machine_that_cannot_be_made_ready_stays_out(desk: Desk) -> None:
    desk.lab.start("node-e", ANA + SUDO + WITHOUT_ARCHIVES)
    refused = desk.ask("add", desk.lab.address("node-e"), code=5)
    assert refused["failed"] == [desk.lab.address("node-e")]
    assert [step["title"].split()[0] for step in refused["steps"] if step["state"] == "failed"] == [
        "packages"
    ]
    assert {host["address"] for host in refused["inventory"]["hosts"]} == {
        desk.lab.address(name) for name in ("node-a", "node-b", "node-c", "node-d")
    }
    assert "node-e" not in desk.states()


def newer_packages_are_installed_under_a_running_job(desk: Desk) -> None:
    """One that is the same program, under a newer version: another release was not to be had here."""
    lab = desk.lab
    for name in ("node-a", "node-b", "node-c", "node-d"):
        lab.ssh(name, ARCHIVE + "mkdir -p /var/local/archive; touch /var/local/archive/Packages")
    before = lab.ssh("node-b", "cat /run/slurmd.pid").stdout
    renewed = desk.ask("upgrade")
    changed = {
        (step["name"], step["title"].split()[0]) for step in renewed["steps"] if step["state"] == "changed"
    }
    assert changed == {("node-b", "newest"), ("node-b", "slurmd")}
    assert lab.ssh("node-b", "dpkg-query -W -f='${Version}' slurmd").stdout.endswith("+shoal1")
    assert lab.ssh("node-b", "cat /run/slurmd.pid").stdout != before
    assert lab.ssh("node-a", "squeue -h -n keep -o '%T %r'").stdout.split()[0] == "RUNNING"
    assert desk.ask("upgrade")["num_changed"] == 0


def machines_leave_dead_or_alive(desk: Desk) -> None:
    lab = desk.lab
    busy = desk.ask("remove", "node-b", code=5)
    assert "run there" in next(step["detail"] for step in busy["steps"] if step["state"] == "failed")
    assert desk.states()["node-b"] == "mix"  # refused, it takes jobs as before
    lab.ssh("node-a", "scancel -n keep")
    desk.as_user("salloc -w node-c --no-shell")
    lab.stop("node-c")
    assert "run there" in desk.type("remove", "node-c", code=5)  # it may live, for all that SSH can tell
    gone = desk.ask("remove", "node-c,node-d", "--force")
    assert [line for line in gone["remarks"] if line.startswith(("node-c", lab.address("node-c")))] != []
    desk.await_states({"node-a": "idle", "node-b": "idle"})
    assert lab.ssh("node-d", KEY_LOOK).stdout == desk.theirs
    assert not [trace for trace in traces(lab, "node-d") if "munge" not in trace and not trace.isdigit()]
    assert desk.srun("-N2") == ["node-a", "node-b"]


def test_machines_are_reached_by_keys_that_are_known_through_a_jump_host_by_a_user_who_may_sudo(
    desk: Desk,
) -> None:
    lab = desk.lab
    lab.start("node-a", ANA)
    line = lab.known_hosts.read_text()
    lab.known_hosts.write_text("")
    reach = (*desk.reach("node-a"), "--dry-run")
    text = desk.type("create", *reach, code=5)
    assert "knows none for it" in text
    assert "--accept-new-host-keys" in text
    text = desk.type("create", *reach, "--accept-new-host-keys", code=5)
    assert "sudo" in text
    assert lab.known_hosts.read_text() == line
    lab.ssh("node-a", SUDO)
    dry = desk.ask("create", *reach, "--jump", f"root@{lab.address('node-a')}")
    assert dry["failed"] == []
    assert {step["state"] for step in dry["steps"]} >= {"would change"}
    other = (lab.folder / "id.pub").read_text().split()
    lab.known_hosts.write_text(f"{lab.address('node-a')} {other[0]} {other[1]}\n")
    text = desk.type("create", *reach, "--accept-new-host-keys", code=5)
    assert "shows another host key" in text
