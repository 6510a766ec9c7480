"""A Slurm on paper: a door that answers without a cluster behind it, and an engine that asks there."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path

from shoal.engines.fake import VirtualClock
from shoal.engines.remote.connection import ControlPlaneAccess
from shoal.engines.slurm.client import CommandTransport
from shoal.engines.slurm.config import SlurmConfig
from shoal.engines.slurm.engine import SlurmEngine
from shoal.engines.slurm.nodes import RawNode
from shoal.engines.slurm.parse import SlurmFacts, parse_nodes
from shoal.engines.slurm.partitions import Partition
from shoal.engines.slurm.render import SlurmJobRequest, job_name
from shoal.engines.slurm.shared_files import UnixAccount
from shoal.engines.slurm.states import SlurmJob
from shoal.model.evidence import Evidence
from shoal.wire import TaskSpec
from tests.support.runtime.task_specs import task_spec_of

NO_PROOF = (Evidence.UNKNOWN, Evidence.CLEARED)
"""What Slurm proves of a task as long as it proves neither an end nor leftovers."""
BOOTED_AT = datetime(2026, 11, 16, 18, 11, 18, tzinfo=UTC).timestamp()
NODE = (
    "NodeName=n0 Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv=4 CPUTot=4 CPULoad=7.27 "
    "AvailableFeatures=fast,ib ActiveFeatures=fast,ib "
    "Gres=gpu:h100:2(S:0,2),gpu:a100:1,nvme:4,bandwidth:lustre:no_consume:4G NodeAddr=10.204.204.10 "
    "NodeHostName=n0 Port=26818 Version=22.05.8 OS=Linux 6.1 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=8000 "
    "AllocMem=0 FreeMem=20021 Sockets=4 Boards=1 State={state} ThreadsPerCore=1 TmpDisk=100 Weight=1 "
    "MCS_label=N/A Partitions=main,low  BootTime=2026-11-16T18:11:18 SlurmdStartTime=2026-11-16T18:56:36 "
    "CfgTRES=cpu=4,mem=8000M,billing=4 AllocTRES= CapWatts=n/a Reason={reason} [root@2026-11-16T18:00:00]"
)


def slurm_task_spec(**more: object) -> TaskSpec:
    fields: dict[str, object] = {
        "attempt_id": "att_1",
        "epoch": 1,
        "job_id": "job_1",
        "job_number": 7,
        "job_name": "train",
        "project": "default",
        "node": "n0",
        "node_rank": 0,
        "nodes": ("n0", "n1"),
        "ranks_per_node": 2,
        "run": "python train.py",
        "cpus": 1.5,
        "memory_bytes": 3 << 30,
        "time_limit_s": 3600.0,
        "gpu_ids": (0, 1),
        "stays_in_cgroup": True,
    }
    return task_spec_of(**{**fields, **more})


class FakeSlurm(CommandTransport):
    """Remembers no job; its one node was started at BOOTED_AT, until it was `restarted`."""

    has_cgroups = True
    is_restarted = False
    has_clock_jumped = False
    """Forward by an hour: what its slurmd says of the boot moves, and when that itself began does not."""
    state = "IDLE"
    reason = "none"
    address = "10.204.204.10"

    def jobs(self) -> list[SlurmJob]:
        return []

    def accounting_jobs(self, names: Collection[str]) -> list[SlurmJob]:
        return []

    def nodes(self) -> list[RawNode]:
        changed = NODE.format(state=self.state, reason=self.reason).replace("10.204.204.10", self.address)
        if self.is_restarted or self.has_clock_jumped:
            changed = changed.replace("2026-11-16T18:11:18", "2026-11-16T19:11:18")
        return parse_nodes(changed.replace("T18:56:36", "T19:56:36") if self.is_restarted else changed)

    def partitions(self) -> list[Partition]:
        return []

    def facts(self) -> SlurmFacts:
        return SlurmFacts(kill_wait_s=30.0, has_cgroups=self.has_cgroups)

    def submit(self, request: SlurmJobRequest, account: UnixAccount | None = None) -> str:
        self.request, self.submitted_as = request, account
        return "1"

    def cancel(self, names: Collection[str], user: str = "") -> None:
        self.cancelled = sorted(names), user


class CancelledJobSlurm(FakeSlurm):
    """Of the first attempt."""

    user = "ana"
    job_state = "CANCELLED"

    def jobs(self) -> list[SlurmJob]:
        return [
            SlurmJob(
                job_id="1", state=self.job_state, name=job_name(slurm_task_spec().identity, 0), user=self.user
            )
        ]


def engine_on(
    home: Path, clock: VirtualClock, slurm: FakeSlurm, config: SlurmConfig | None = None
) -> SlurmEngine:
    reach = ControlPlaneAccess(urls=("https://login:1",), ca="ca")
    return SlurmEngine(home, clock=clock, access=reach, config=config or SlurmConfig(), transport=slurm)
