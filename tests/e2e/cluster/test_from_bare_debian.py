"""A machine on which nothing is installed but sshd and sudo becomes a cluster: apt gets the rest from Debian.

A minimal Debian 13 (`scripts/setup bare-debian` makes it) as a machine of `tests/support/host/machines.py`,
whose
apt goes through a proxy here. Needs the network.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.style.tree import ROOT
from tests.support.host.admin_shell import ANA, SUDO, AdminShell, admin_shell, apt_proxy
from tests.support.host.machines import missing_programs

BARE = Path(os.environ.get("SHOAL_TEST_BARE_DEBIAN", ROOT / ".cache" / "bare-debian"))
PACKAGES = (
    "dpkg-query -W -f='${Package}\\n' munge slurmd slurmctld slurmdbd mariadb-server python3 2>/dev/null"
)

pytestmark = [
    pytest.mark.engines,
    pytest.mark.soak,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(missing_programs()), reason=missing_programs() or "nothing is missing"),
    pytest.mark.skipif(not BARE.exists(), reason="needs a bare Debian: scripts/setup bare-debian"),
]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[AdminShell]:
    with admin_shell(tmp_path) as desk:
        yield desk


def test_what_a_bare_machine_lacks_is_installed_and_goes_again(desk: AdminShell) -> None:
    lab = desk.lab
    with apt_proxy(lab.gateway) as url:
        proxy = f"""echo 'Acquire::http::Proxy "{url}";' >/etc/apt/apt.conf.d/90proxy\n"""
        lab.start("node-a", ANA + SUDO + proxy, BARE)
        assert lab.ssh("node-a", PACKAGES, check=False).stdout == ""
        created = desk.run_cluster_json("create", *desk.host_options("node-a"))
        changed = {step["title"] for step in created["steps"] if step["state"] == "changed"}
        assert "packages munge slurm-client slurmctld slurmdbd mariadb-server slurmd python3" in changed
        assert lab.ssh("node-a", "sinfo --version").stdout.startswith("slurm-wlm 24.11")
        assert desk.srun("-N1") == ["node-a"]
        assert desk.run_cluster_json("create")["num_changed"] == 0
        desk.run("up", code=0)
        arguments = (
            "run",
            "--",
            "/usr/bin/python3",
            "-c",
            "import os; print('here on', os.uname().nodename)",
        )
        assert "here on node-a" in desk.run(*arguments, code=0).stdout
        desk.run("down", code=0)
        gone = desk.run_cluster_json("destroy", "--yes", "--packages")
        assert gone["inventory"] is None
        left = lab.ssh("node-a", "dpkg-query -W -f='${Package} ${db:Status-Abbrev}\\n' | grep ' ii'").stdout
        assert not {"munge", "slurmd", "slurmctld", "slurmdbd", "mariadb-server"} & set(left.split())
