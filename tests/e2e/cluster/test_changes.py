"""What happens to a cluster that is there: keys of others, newer packages, machines that die or leave.

Real daemons on machines that are namespaces (`tests/support/host/machines.py`), two minutes of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.support.host.admin_shell import (
    ANA,
    FOREIGN_KEY,
    SHOW_KEY_DIGEST,
    SUDO,
    AdminShell,
    admin_shell,
    cluster_traces,
)
from tests.support.host.machines import missing_programs

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing_programs()), reason=missing_programs() or "nothing is missing"),
]

SEED = 7
WITHOUT_ARCHIVES = """\
dpkg --purge --force-all slurmd >/dev/null 2>&1
rm -rf /etc/apt/sources.list* /var/lib/apt/lists/*
"""
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


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[AdminShell]:
    with admin_shell(tmp_path) as desk:
        yield desk


def test_a_cluster_with_a_key_of_its_own_grows_is_renewed_and_shrinks(desk: AdminShell) -> None:
    lab = desk.lab
    lab.start("node-a", ANA + SUDO + FOREIGN_KEY)
    lab.start("node-b", ANA + SUDO + NEWER_SLURMD)
    lab.start("node-c", ANA + SUDO)
    names = ("node-a", "node-b", "node-c")
    key = lab.ssh("node-a", SHOW_KEY_DIGEST).stdout
    hosts = lab.ssh("node-a", "cat /etc/hosts").stdout

    a_key_that_was_there_before_is_refused_or_kept(desk, names)
    desk.as_user("sbatch -J keep -w node-b -o /dev/null --wrap 'sleep 600'")
    theirs = a_machine_with_another_key_is_refused_or_gets_ours(desk)
    a_machine_that_cannot_be_made_ready_stays_out(desk)
    newer_packages_are_installed_under_a_running_job(desk)
    machines_leave_dead_or_alive(desk, theirs)

    lab.ssh("node-a", "touch /etc/slurm/mine")
    down = desk.run_cluster_json("destroy", "--yes")
    assert down["inventory"] is None
    assert cluster_traces(lab, "node-b") == []
    assert lab.ssh("node-a", SHOW_KEY_DIGEST).stdout == key
    assert lab.ssh("node-a", "cat /etc/hosts").stdout == hosts
    assert lab.ssh("node-a", "ls /etc/slurm").stdout.split() == ["mine"]
    assert "no cluster yet" in desk.run_cluster()


def a_key_that_was_there_before_is_refused_or_kept(desk: AdminShell, names: tuple[str, ...]) -> None:
    text = desk.run_cluster("create", *desk.host_options(*names), code=5)
    assert "/etc/munge/munge.key that was there before Shoal" in text
    assert cluster_traces(desk.lab, "node-b") == []
    desk.run_cluster_json("create", *desk.host_options(*names), "--existing", "keep")
    assert len({desk.lab.ssh(name, SHOW_KEY_DIGEST).stdout for name in names}) == 1


def a_machine_with_another_key_is_refused_or_gets_ours(desk: AdminShell) -> str:
    """`--existing replace` puts it aside until the machine leaves."""
    lab = desk.lab
    lab.start("node-d", ANA + SUDO + FOREIGN_KEY)
    refused = desk.run_cluster_json("add", lab.address("node-d"), code=5)
    assert refused["failed"] == [lab.address("node-d")]
    theirs = lab.ssh("node-d", SHOW_KEY_DIGEST).stdout
    added = desk.run_cluster_json("add", lab.address("node-d"), "--existing", "replace")
    assert added["failed"] == []
    desk.wait_for_states({"node-a": "idle", "node-b": "mix", "node-c": "idle", "node-d": "idle"})
    return theirs


def a_machine_that_cannot_be_made_ready_stays_out(desk: AdminShell) -> None:
    desk.lab.start("node-e", ANA + SUDO + WITHOUT_ARCHIVES)
    refused = desk.run_cluster_json("add", desk.lab.address("node-e"), code=5)
    assert refused["failed"] == [desk.lab.address("node-e")]
    assert [step["title"].split()[0] for step in refused["steps"] if step["state"] == "failed"] == [
        "packages"
    ]
    assert {host["address"] for host in refused["inventory"]["hosts"]} == {
        desk.lab.address(name) for name in ("node-a", "node-b", "node-c", "node-d")
    }
    assert "node-e" not in desk.node_states()


def newer_packages_are_installed_under_a_running_job(desk: AdminShell) -> None:
    """One that is the same program, under a newer version: another release was not to be had here."""
    lab = desk.lab
    for name in ("node-a", "node-b", "node-c", "node-d"):
        lab.ssh(name, ARCHIVE + "mkdir -p /var/local/archive; touch /var/local/archive/Packages")
    before = lab.ssh("node-b", "cat /run/slurmd.pid").stdout
    renewed = desk.run_cluster_json("upgrade")
    changed = {
        (step["name"], step["title"].split()[0]) for step in renewed["steps"] if step["state"] == "changed"
    }
    assert changed == {("node-b", "newest"), ("node-b", "slurmd")}
    assert lab.ssh("node-b", "dpkg-query -W -f='${Version}' slurmd").stdout.endswith("+shoal1")
    assert lab.ssh("node-b", "cat /run/slurmd.pid").stdout != before
    assert lab.ssh("node-a", "squeue -h -n keep -o '%T %r'").stdout.split()[0] == "RUNNING"
    assert desk.run_cluster_json("upgrade")["num_changed"] == 0


def machines_leave_dead_or_alive(desk: AdminShell, theirs: str) -> None:
    lab = desk.lab
    lab.ssh("node-a", "scontrol update nodename=node-b state=drain reason=leaves")  # by one that was cut off
    busy = desk.run_cluster_json("remove", "node-b", code=5)
    detail = next(step["detail"] for step in busy["steps"] if step["state"] == "failed")
    assert "runs there" in detail
    assert detail.endswith("node-b was drained, and takes jobs as before")
    assert desk.node_states()["node-b"].rstrip("*") == "mix"  # refused, it takes jobs as before
    lab.ssh("node-a", "scontrol update nodename=node-b state=drain reason='bad fan'")
    desk.run_cluster_json("remove", "node-b", code=5)
    assert desk.node_states()["node-b"].rstrip("*") == "drng"  # somebody else's drain
    lab.ssh("node-a", "scontrol update nodename=node-b state=resume")
    lab.ssh("node-a", "scancel -n keep")
    desk.as_user("salloc -w node-c --no-shell")
    lab.stop("node-c")
    assert "runs there" in desk.run_cluster(
        "remove", "node-c", code=5
    )  # it may live, for all that SSH can tell
    gone = desk.run_cluster_json("remove", "node-c,node-d", "--force")
    assert [line for line in gone["remarks"] if line.startswith(("node-c", lab.address("node-c")))] != []
    desk.wait_for_states({"node-a": "idle", "node-b": "idle"})
    assert lab.ssh("node-d", SHOW_KEY_DIGEST).stdout == theirs
    assert not [
        trace for trace in cluster_traces(lab, "node-d") if "munge" not in trace and not trace.isdigit()
    ]
    assert desk.srun("-N2") == ["node-a", "node-b"]


def test_what_was_killed_anywhere_goes_on_when_it_is_typed_again(desk: AdminShell) -> None:
    lab, names, luck = desk.lab, ("node-a", "node-b"), Random(SEED)
    for name in names:
        lab.start(name, ANA + SUDO)
    hosts = lab.ssh("node-a", "cat /etc/hosts").stdout
    reach = desk.host_options(*names)
    killed = sum(desk.kill("create", "--no-connect", *reach, after_s=luck.uniform(0.5, 8)) for _ in range(8))
    assert killed > 3
    desk.run_cluster_json("create", "--no-connect", *reach)
    desk.wait_for_states(dict.fromkeys(names, "idle"))
    assert desk.srun("-N2") == ["node-a", "node-b"]
    assert desk.run_cluster_json("create", "--no-connect")["num_changed"] == 0
    for _ in range(6):
        desk.kill("destroy", "--yes", "--force", after_s=luck.uniform(0.5, 5))
    if "no cluster yet" not in desk.run_cluster():
        assert "destroy did not finish" in desk.run_cluster("show")
        desk.run_cluster_json("destroy", "--yes")
    assert [cluster_traces(lab, name) for name in names] == [[], []]
    assert lab.ssh("node-a", "cat /etc/hosts").stdout == hosts
    assert lab.ssh("node-a", "ls -d /var/lib/mysql/slurm_acct", check=False).returncode != 0
