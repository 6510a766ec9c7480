"""What `shoal connect slurm` wrote down about the cluster."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shoal.engines.cluster_id import ClusterId
from shoal.engines.connection import Connection, load

FILE = "slurm.json"


class SlurmConfig(Connection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    partition: str = ""
    """Only nodes of it; of several, separated by commas, the first that takes a job. Empty: of all."""
    account: str = ""
    accounts: dict[str, str] = msgspec.field(default_factory=dict)
    """By project, where it has its own."""
    default_account: str = ""
    """Whom Slurm charged, when it was connected, where none is named; empty: nobody knows."""
    qos: str = ""
    project_qos: dict[str, str] = msgspec.field(default_factory=dict)
    ssh: str = ""
    """`user@host` of a login node; empty: this machine is one."""
    ssh_options: tuple[str, ...] = ()
    """Words for `ssh` itself: a port, a jump host, a key."""
    rest: str = ""
    """Where slurmrestd listens, to be asked instead of running commands; empty: commands."""
    jwt_file: str = ""
    """Holds the token for it."""
    rest_user: str = ""
    """Whose jobs they are; empty: whose the token is."""
    rest_uid: int | None = None
    """Who listened there when it was connected, where the system told: nobody else gets the token."""
    as_owners: bool = False
    """Each job under the Unix account of its owner; whoever runs Slurm's commands is root."""
    system_accounts: tuple[str, ...] = ()
    """Those of them that may have a uid of the system's."""
    cluster: str = ""
    """What it called itself when it was connected; empty: it did not say."""
    heads: tuple[str, ...] = ()
    """The machines of its slurmctld then."""

    @property
    def cluster_id(self) -> ClusterId:
        return ClusterId(engine="slurm", name=self.cluster, heads=self.heads, way=self.rest or self.ssh)

    @property
    def partitions(self) -> tuple[str, ...]:
        return tuple(name for name in self.partition.split(",") if name)

    def account_of(self, project: str) -> str:
        return self.accounts.get(project, self.account)

    def qos_of(self, project: str) -> str:
        return self.project_qos.get(project, self.qos)


def load_config(home: Path) -> SlurmConfig:
    """`SpecError` where nobody connected this home, or the file is broken."""
    return load(home / FILE, SlurmConfig, "Slurm")
