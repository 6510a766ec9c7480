"""How this engine speaks to Slurm: what it needs, and the two doors that have it.

Slurm's commands, here or over SSH (`client`), and slurmrestd (`rest`). Nobody behind a door knows orders.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from shoal.engines.slurm.associations import Association
from shoal.engines.slurm.client import CommandDoor
from shoal.engines.slurm.config import SlurmConfig
from shoal.engines.slurm.nodes import RawNode
from shoal.engines.slurm.parse import SlurmFacts
from shoal.engines.slurm.partitions import Partition
from shoal.engines.slurm.render import Request
from shoal.engines.slurm.rest import RestDoor
from shoal.engines.slurm.states import Job


class Door(Protocol):
    """Blocking. Every method raises `EngineUnreachable` when Slurm could not be asked."""

    def submit(self, request: Request) -> str:
        """The job's id. `EngineRefused`: for ever, in Slurm's own words; what may pass is
        `EngineUnreachable`, as is an answer that did not come.
        """

    def jobs(self) -> list[Job]:
        """Every job of this user that Slurm remembers."""

    def past(self, names: Collection[str]) -> list[Job]:
        """What Slurm's accounting has written down about this user's jobs of these names; nothing where it
        keeps none.
        """

    def nodes(self) -> list[RawNode]: ...

    def partitions(self) -> list[Partition]:
        """Hidden ones, too, and those that we may not use."""

    def associations(self) -> list[Association]:
        """What accounting lets this user have; nothing where there is none, or it does not answer, or each
        job is its owner's.
        """

    def facts(self) -> SlurmFacts:
        """How Slurm is set up. What a door does not show is as if it were not so."""

    def cancel(self, names: Collection[str], user: str = "") -> None:
        """By name: an id may be somebody else's by now. `user`: of that Unix account alone; empty: ours.
        What is not there is not an error.
        """

    def make_folder(self, path: str) -> None:
        """With its parents, of a directory that all nodes share. `EngineRefused`: it cannot be made."""

    def has_folder(self, path: str) -> bool:
        """Whether there is such a directory where `make_folder` would make it."""

    def outputs(self, folder: str) -> dict[str, int]:
        """What Slurm has written for jobs of ours: bytes, by the file's path below that folder."""

    def drop_outputs(self, folder: str, paths: Collection[str]) -> None:
        """Remove these, as they were told. One that is gone is not an error."""

    def version(self) -> str: ...

    def is_root(self) -> bool:
        """Whether jobs run as root."""

    def asker(self) -> str:
        """The name of the account under which jobs run, where they are not their owners'."""


def open_door(config: SlurmConfig, sockets: Path | None = None) -> Door:
    """Asks nothing yet. `SpecError`: a token would go where it must not. `sockets`: see `CommandDoor`."""
    if config.rest:
        return RestDoor(config.rest, config.jwt_file, user=config.rest_user, served_by=config.rest_uid)
    return CommandDoor(config.ssh, config.ssh_options, as_owners=config.as_owners, sockets=sockets)
