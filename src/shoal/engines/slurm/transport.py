"""The interface through which the Slurm engine talks to Slurm, with two implementations.

`client` runs Slurm's commands, here or over SSH; `rest` asks slurmrestd. No code behind this interface
knows task specs.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from shoal.engines.slurm.client import CommandTransport
from shoal.engines.slurm.config import SlurmConfig
from shoal.engines.slurm.nodes import RawNode
from shoal.engines.slurm.parse import SlurmFacts
from shoal.engines.slurm.partitions import Association, Partition
from shoal.engines.slurm.render import SlurmJobRequest
from shoal.engines.slurm.rest import RestTransport
from shoal.engines.slurm.states import SlurmJob


class SlurmTransport(Protocol):
    """What the Slurm engine needs of Slurm. Blocking. Every method raises `EngineUnreachable` if Slurm was
    not asked.
    """

    def submit(self, request: SlurmJobRequest) -> str:
        """Submit a job and return its id.

        `EngineRefused`: Slurm will never accept it; the message has its reason. `EngineUnreachable`: a
        refusal that may pass, or no reply.
        """

    def jobs(self) -> list[SlurmJob]:
        """Return every job of this user that Slurm remembers."""

    def accounting_jobs(self, names: Collection[str]) -> list[SlurmJob]:
        """Return what accounting has of this user's jobs of these names; empty if there is no accounting."""

    def nodes(self) -> list[RawNode]: ...

    def partitions(self) -> list[Partition]:
        """Return all partitions, including hidden ones and those that we may not use."""

    def associations(self) -> list[Association]:
        """Return this user's associations.

        Empty if there is no accounting, if it does not reply, or if each job runs as its owner.
        """

    def facts(self) -> SlurmFacts:
        """Return Slurm's configuration. What a transport does not show counts as not set."""

    def cancel(self, names: Collection[str], user: str = "") -> None:
        """Cancel jobs by name, because an id may be another user's by now.

        `user`: only this Unix account's jobs; empty: ours. A job that does not exist is no error.
        """

    def make_folder(self, path: str) -> None:
        """Create the folder with its parents, on a directory that all nodes share. `EngineRefused`:
        impossible.
        """

    def has_folder(self, path: str) -> bool:
        """Return whether the folder exists where `make_folder` would create it."""

    def outputs(self, folder: str) -> dict[str, int]:
        """Return the output files of our jobs: size in bytes by the path below that folder."""

    def drop_outputs(self, folder: str, paths: Collection[str]) -> None:
        """Remove these files. One that is gone is no error."""

    def version(self) -> str: ...

    def is_root(self) -> bool:
        """Return whether jobs run as root."""

    def account_name(self) -> str:
        """Return the account under which jobs run, if they do not run as their owners."""


def open_transport(config: SlurmConfig, sockets: Path | None = None) -> SlurmTransport:
    """Create the transport; send nothing.

    `SpecError`: the token would go over an insecure way. `sockets`: see `CommandTransport`.
    """
    if config.rest:
        return RestTransport(config.rest, config.jwt_file, user=config.rest_user, served_by=config.rest_uid)
    return CommandTransport(config.ssh, config.ssh_options, as_owners=config.as_owners, sockets=sockets)
