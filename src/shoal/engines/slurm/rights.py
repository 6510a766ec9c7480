"""Whose jobs come to Slurm with what rights, and which partitions are theirs by these. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.engines.slurm.config import SlurmConfig
from shoal.engines.slurm.nodes import RawNode
from shoal.engines.slurm.parse import SlurmFacts
from shoal.engines.slurm.partitions import Partition, Parts, Rights, divide


def rights_of(config: SlurmConfig, facts: SlurmFacts, project: str) -> Rights:
    """Of the jobs of a project."""
    return Rights(
        is_root=facts.is_root,
        groups=facts.groups,
        account=config.account_of(project) or config.default_account,
        qos=config.qos_of(project),
    )


def parts_of(
    config: SlurmConfig, facts: SlurmFacts, partitions: Iterable[Partition], nodes: Iterable[RawNode]
) -> Parts:
    """For jobs of any project: what only some of them may use is refused to the others when it is known
    whose a job is.
    """
    projects = ["", *config.accounts, *config.project_qos]
    rights = [rights_of(config, facts, project) for project in projects]
    nodes_of = {node.name: node.partitions for node in nodes}
    return divide(partitions, nodes_of, config.partitions, rights)
