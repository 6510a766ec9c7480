"""A job that runs on one cluster, and a control plane that is connected to another: the job runs only once.

The cluster is a fake Slurm: programs with the names of its commands, whose `sbatch` runs the script at once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.home import pid_holding
from tests.support.planes.real import RankGate, RealPlane, until
from tests.support.runtime.tasks import SOURCE

pytestmark = [pytest.mark.slow]
NODE = (
    "NodeName=n0 CPUEfctv=4 CPUTot=4 NodeAddr=127.0.0.1 RealMemory=8000 State=IDLE TmpDisk=100 "
    "Partitions=main BootTime=2026-11-16T18:11:18"
)
COMMANDS = {
    "sinfo": "echo slurm 22.05.8",
    "scontrol": f"""case $* in
*node*) echo '{NODE}' ;;
*config*) printf 'ClusterName = %s\\nSlurmctldHost[0] = a\\n' "$CLUSTER" ;;
esac""",
    "sbatch": """for word; do case $word in --job-name=*) name=${word#*=} ;; esac; done
cat >"$STATE/$name.sh"
echo "1|RUNNING|me|N/A|$name|None" >>"$STATE/jobs"
SLURMD_NODENAME=n0 setsid sh "$STATE/$name.sh" >"$STATE/out" 2>&1 &
echo 1""",
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"',
    "squeue": """while read -r job
do printf '%s%s\\n' "${SQUEUE_FORMAT%%\\%*}" "$job"
done <"$STATE/jobs\"""",
    "scancel": ":",
    "sacct": ":",
}


class PaperPlane(RealPlane):
    """A control plane beside a fake Slurm that is called `lab`."""

    def __init__(self, top: Path) -> None:
        super().__init__(top / "home", demo="none")
        self.spool = top / "spool"
        bin_, state = top / "bin", top / "state"
        bin_.mkdir()
        state.mkdir()
        (state / "jobs").touch()
        for name, text in COMMANDS.items():
            (bin_ / name).write_text(f"#!/bin/sh\nSTATE={state}\n{text}\n")
            (bin_ / name).chmod(0o755)
        self.env |= {"PATH": f"{bin_}:{os.environ['PATH']}", "CLUSTER": "lab"}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._nodes_on = f"127.0.0.1:{free.getsockname()[1]}"

    def connect(self, *arguments: str, cluster: str = "lab") -> tuple[int, str]:
        """Return the exit code and the output."""
        self.env["CLUSTER"] = cluster
        at = ("--python-path", SOURCE, "--spool", str(self.spool), "--nodes-on", self._nodes_on)
        done = self.command("connect", "slurm", "--as-root", *at, *arguments)
        self.env["CLUSTER"] = "lab"
        return done.returncode, " ".join(done.stderr.split())

    def failed_up(self, **env: str) -> str:
        """Return the output of a `shoal up` that fails."""
        kept, self.env = self.env, {**self.env, **env}
        done = self.command("up", *self._flags)
        self.env = kept
        assert done.returncode != 0, done.stdout
        assert pid_holding(self.home) is None
        return " ".join(done.stderr.split())


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[PaperPlane]:
    plane = PaperPlane(tmp_path)
    try:
        yield plane
    finally:
        plane.down()


def test_a_job_on_a_slurm_is_judged_by_no_other_cluster_and_runs_once(
    plane: PaperPlane, gate: RankGate
) -> None:
    assert plane.connect() == (0, "")
    plane.up()
    job = plane.submit(gate.run_line(), resources={"cpus": 1})
    gate.wait_for_ranks()
    plane.until_status(job, "running")
    assert plane.command("down").returncode == 0

    left = f"a control plane over this machine does not know them: {job.ref} on n0"
    refused = plane.command("connect", "local")
    assert (refused.returncode, left in " ".join(refused.stderr.split())) == (3, True), refused.stderr
    code, output = plane.connect(cluster="prod")
    unknown = "over the Slurm `prod` (a) does not know them"
    assert (code, unknown in output) == (3, True), output
    output = plane.failed_up(SHOAL_ENGINE="local")
    assert "1 attempts may run on the Slurm `lab` (a)" in output
    assert f"{job.ref} on n0" in output
    # The same cluster with other flags is no other one, and the flags of that `shoal up` are forgotten.
    assert plane.connect("--partition", "main") == (0, "")

    plane.env["CLUSTER"] = "prod"  # another Slurm behind the same commands
    plane.up()
    log = plane.home / "logs" / "control.log"
    until(lambda: "the Slurm `prod` (a) answers" in log.read_text(), "that is noticed")
    assert plane.command("down").returncode == 0
    plane.env["CLUSTER"] = "lab"

    plane.up()
    assert not gate.is_gone(0)
    gate.open()
    plane.until_status(job, "succeeded")
    assert len(plane.attempts(job)) == 1
    assert [node["name"] for node in plane.shoal.nodes()] == ["n0"]
    assert "over the Slurm `lab` (a): 1 node" in plane.command("up").stdout
    assert plane.command("down").returncode == 0
    assert plane.command("connect", "local").returncode == 0
    plane.up()
    until(lambda: "n0" not in [node["name"] for node in plane.shoal.nodes()], "that node is forgotten")


def test_a_job_on_this_machine_is_not_handed_to_a_cluster(plane: PaperPlane, gate: RankGate) -> None:
    plane.up()
    job = plane.submit(gate.run_line(), resources={"cpus": 1})
    gate.wait_for_ranks()
    plane.until_status(job, "running")
    assert plane.command("down").returncode == 0
    code, told = plane.connect()
    left = "may run on this machine, and a control plane over the Slurm `lab` (a) does not know them"
    assert (code, f"{left}: {job.ref} on" in told) == (3, True), told
    gate.open()
    plane.up()
    plane.until_status(job, "succeeded")
    assert len(plane.attempts(job)) == 1
