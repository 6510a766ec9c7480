"""A thousand queued jobs on a Slurm of many nodes: how long they take, how often Slurm is asked, and the
cost.

No job begins before the last is queued. Each job takes a whole node, so that as many run at once with Shoal
as without it. The benchmark counts the commands that Shoal runs, with wrappers first on its PATH. It also
counts the CPU time of the control plane, of slurmctld, and of the nodes, where a job of Shoal's is a Python
process of its own.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks.engines.accounting import CpuAccount
from benchmarks.engines.clusters import plane_on, slurm_cluster
from benchmarks.engines.commands import SLURM, Command, Ledger, closest, per_second, worst_second
from benchmarks.engines.say import say
from benchmarks.measure import Doorbell, table, times
from benchmarks.processes import BenchmarkError, usage
from shoal.home import pid_holding
from tests.support.host.processes import PATH
from tests.support.planes.cluster_plane import ClusterPlane
from tests.support.slurm.real_slurm import SlurmLab, SlurmShape

GPUS = 8
JOB = {"cpus": 1, "gpus": GPUS}
WITHIN_S = 1500.0
SAY_S = 10.0
ASKED = ("squeue", "sbatch", "scontrol", "scancel")


@dataclass(frozen=True)
class Driven:
    """All jobs. Seconds count from the time at which the first could begin."""

    how: str
    queued_s: float
    """The time before that to queue all jobs, one after the other."""
    ran_s: float
    """Until the last job had run its first instruction."""
    ended_s: float
    """Until the process that queued the jobs knew that all had ended."""
    spent: Spent
    commands: list[Command] = field(default_factory=list)


class Spent(NamedTuple):
    """CPU seconds."""

    control: float
    slurmctld: float
    nodes: float


class Site(NamedTuple):
    lab: SlurmLab
    bell: Doorbell
    account: CpuAccount

    def spent(self, plane: ClusterPlane | None = None) -> Spent:
        slurmctld = int((self.lab.root / "run" / "slurmctld.pid").read_text())
        control = pid_holding(plane.home) if plane is not None else None
        control_cpu_s = usage([control]).cpu_s if control else 0.0
        return Spent(control_cpu_s, usage([slurmctld]).cpu_s, self.account.cpu_s())


def measure(root: Path, nodes: int, jobs: int) -> None:
    ledger, account = Ledger(root, SLURM, PATH), CpuAccount()
    try:
        with slurm_cluster(root, SlurmShape(nodes=nodes, gpus=GPUS)) as lab, Doorbell(lab.address) as bell:
            account.add(pid for name in lab.names for pid in lab.pids_on(name))
            site = Site(lab, bell, account)
            plain = drive_plainly(site, jobs)
            with plane_on(root, lab, ledger) as plane:
                through = drive(site, plane, ledger, jobs)
    finally:
        account.close()
    show(plain, through, nodes, jobs)


def drive_plainly(site: Site, jobs: int) -> Driven:
    """Run one `sbatch` after the other, as a script would, and `squeue` once a second until none is left."""
    lab, before, began = site.lab, site.spent(), time.monotonic()
    lab.run("scontrol", "update", "PartitionName=main", "State=DOWN")
    options = ["--parsable", "-N1", "-c1", f"--gres=gpu:{GPUS}", "-o/dev/null", "-D/"]
    for number in range(jobs):
        lab.run("sbatch", *options, "--wrap", site.bell.script(f"plain-{number}"))
    queued_s, began = time.monotonic() - began, time.monotonic()
    say(f"queue, sbatch: {jobs} jobs queued in {queued_s:.0f} s")
    lab.run("scontrol", "update", "PartitionName=main", "State=UP")
    ran_s = _until_rung(site.bell, jobs, began, "sbatch")
    while lab.run("squeue", "-h", "-o", "%i"):
        time.sleep(1.0)
    ended_s = time.monotonic() - began
    return Driven("sbatch", queued_s, ran_s, ended_s, _less(site.spent(), before))


def drive(site: Site, plane: ClusterPlane, ledger: Ledger, jobs: int) -> Driven:
    before, began_at, rung = site.spent(plane), time.time(), site.bell.count()
    for name in site.lab.names:
        plane.shoal.cordon(name, because="nothing begins before all is queued")
    began = time.monotonic()
    for number in range(jobs):
        plane.submit(site.bell.script(f"shoal-{number}"), resources=JOB)
    queued_s, began = time.monotonic() - began, time.monotonic()
    say(f"queue, Shoal: {jobs} jobs queued in {queued_s:.0f} s")
    for name in site.lab.names:
        plane.shoal.resume(name)
    ran_s = _until_rung(site.bell, rung + jobs, began, "Shoal")
    while _num_open(plane):
        if time.monotonic() - began > WITHIN_S:
            raise BenchmarkError(f"{_num_open(plane)} jobs have run and not ended after {WITHIN_S:g} s")
        time.sleep(0.5)
    ended_s = time.monotonic() - began
    if failed := len(list(plane.shoal.jobs(status=("failed",)))):
        raise BenchmarkError(f"{failed} of {jobs} jobs failed")
    spent = _less(site.spent(plane), before)
    return Driven("Shoal", queued_s, ran_s, ended_s, spent, ledger.read(began_at))


def _num_open(plane: ClusterPlane) -> int:
    counts = plane.shoal.status()["counts"]
    return sum(counts.get(word, 0) for word in ("queued", "starting", "running", "stopping"))


def _until_rung(bell: Doorbell, wanted: int, began: float, who: str) -> float:
    """Return the seconds from `began` until this many labels have arrived. Prints progress."""
    next_say = time.monotonic() + SAY_S
    while bell.count() < wanted:
        now = time.monotonic()
        if now - began > WITHIN_S:
            raise BenchmarkError(f"{who}: {wanted - bell.count()} jobs have not run after {WITHIN_S:g} s")
        if now >= next_say:
            say(f"queue, {who}: {wanted - bell.count()} jobs have not run yet")
            next_say = now + SAY_S
        time.sleep(0.05)
    return time.monotonic() - began


def _less(after: Spent, before: Spent) -> Spent:
    return Spent(*(late - soon for late, soon in zip(after, before, strict=True)))


def show(plain: Driven, through: Driven, nodes: int, jobs: int) -> None:
    title = f"{jobs:,} queued jobs of a whole node each on {nodes} nodes of a real Slurm, measured in one run"
    rows = [
        [
            driven.how,
            f"{driven.queued_s:.1f} s",
            f"{driven.ran_s:.1f} s",
            f"{driven.ended_s:.1f} s",
            times(driven.ended_s, plain.ended_s),
            f"{driven.spent.control:.1f} s",
            f"{driven.spent.slurmctld:.1f} s",
            f"{driven.spent.nodes / jobs * 1000:.0f} ms",
        ]
        for driven in (plain, through)
    ]
    sys.stdout.write("\n" + table(title, HEADER, rows))
    rows = []
    for name in ASKED:
        moments = [command.at for command in through.commands if command.name == name]
        gap = closest(moments)
        mean = per_second(moments, through.queued_s + through.ended_s)
        gap_text = "-" if gap is None else f"{gap:.2f} s"
        rows.append([name, str(len(moments)), f"{mean:.2f}", str(worst_second(moments)), gap_text])
    head = ["command", "times", "a second, mean", "in the worst second", "closest two"]
    sys.stdout.write("\n" + table("Commands that Shoal ran, from the first submit on", head, rows))
    sys.stdout.flush()


HEADER = [
    "by",
    "queued in",
    "all have run",
    "all have ended",
    "against sbatch",
    "control plane CPU",
    "slurmctld CPU",
    "nodes' CPU, each job",
]
