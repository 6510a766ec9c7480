"""The configuration that `shoal connect slurm` wrote: accounts, partitions and the rights of each project's
jobs.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from shoal.engines.home_records import ClusterId
from shoal.engines.remote.connection import ClusterConnection, load_connection
from shoal.engines.slurm.nodes import RawNode
from shoal.engines.slurm.parse import SlurmFacts
from shoal.engines.slurm.partitions import Partition, PartitionRights, UsablePartitions, find_usable

FILE = "slurm.json"


class SlurmConfig(ClusterConnection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    partition: str = ""
    """The partition of jobs; of several, separated by commas, the first that accepts a job. Empty: all."""
    account: str = ""
    accounts: dict[str, str] = msgspec.field(default_factory=dict)
    """By project, for projects with their own."""
    default_account: str = ""
    """The account that Slurm charges by default, at the time of `shoal connect`; empty: unknown."""
    qos: str = ""
    project_qos: dict[str, str] = msgspec.field(default_factory=dict)
    ssh: str = ""
    """`user@host` of a login node; empty: this machine is one."""
    ssh_options: tuple[str, ...] = ()
    """Arguments for `ssh` itself: a port, a jump host, a key."""
    rest: str = ""
    """The URL of slurmrestd, which is asked instead of running commands; empty: commands."""
    jwt_file: str = ""
    """The file with its token."""
    rest_user: str = ""
    """The user whose jobs they are; empty: the token's user."""
    rest_uid: int | None = None
    """The user that listened there at `shoal connect`, if known: no other user gets the token."""
    as_owners: bool = False
    """Each job runs under the Unix account of its owner. Slurm's commands then run as root."""
    system_accounts: tuple[str, ...] = ()
    """The accounts that may have a system uid."""
    cluster: str = ""
    """The cluster's name at `shoal connect`; empty: it reported none."""
    heads: tuple[str, ...] = ()
    """The machines of its slurmctld at that time."""

    @property
    def cluster_id(self) -> ClusterId:
        return ClusterId(engine="slurm", name=self.cluster, heads=self.heads, endpoint=self.rest or self.ssh)

    @property
    def partitions(self) -> tuple[str, ...]:
        return tuple(name for name in self.partition.split(",") if name)

    def account_of(self, project: str) -> str:
        return self.accounts.get(project, self.account)

    def qos_of(self, project: str) -> str:
        return self.project_qos.get(project, self.qos)


def load_config(home: Path) -> SlurmConfig:
    """Load the configuration. `SpecError`: this home is not connected, or the file is broken."""
    return load_connection(home / FILE, SlurmConfig, "Slurm")


def partition_rights(config: SlurmConfig, facts: SlurmFacts, project: str) -> PartitionRights:
    """Return the rights of a project's jobs."""
    return PartitionRights(
        is_root=facts.is_root,
        groups=facts.groups,
        account=config.account_of(project) or config.default_account,
        qos=config.qos_of(project),
    )


def usable_partitions(
    config: SlurmConfig, facts: SlurmFacts, partitions: Iterable[Partition], nodes: Iterable[RawNode]
) -> UsablePartitions:
    """Return the partitions that jobs of at least one project may use.

    If only some projects may use a partition, the jobs of others are refused when their project is known.
    """
    projects = ["", *config.accounts, *config.project_qos]
    rights = [partition_rights(config, facts, project) for project in projects]
    nodes_of = {node.name: node.partitions for node in nodes}
    return find_usable(partitions, nodes_of, config.partitions, rights)
