"""The inventory: the machines of a cluster, how to reach each, and what each is for. One YAML file.

`create` writes it, `add` and `remove` change it, and all other commands read it. `provider` is for clusters
made by a cloud (AWS ParallelCluster, Google Cluster Toolkit); only `ssh` exists today.
"""

from __future__ import annotations

import os
import re
import secrets as randomness
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shoal.errors import NotFound, SpecError, StateError

NAME_PATTERN = r"^[a-z][a-z0-9-]{0,38}$"
"""Slurm lower-cases cluster names; MariaDB and file names accept these as they are."""
HOSTNAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9-]{0,62}$"
USER_PATTERN = r"^[a-z_][a-z0-9_-]{0,31}$"
ADDRESS_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9.:%-]{0,252}$"
JUMP_PATTERN = r"^([a-z_][a-z0-9_-]{0,31}@)?[A-Za-z0-9][A-Za-z0-9.-]{0,252}(:[0-9]{1,5})?$"
SHARED_PATTERN = r"^(/[A-Za-z0-9_][A-Za-z0-9._-]*)+$"
SETTING_PATTERN = r"^[A-Za-z][A-Za-z0-9]{1,63}$"

HEAD = "# Written by `shoal cluster`. Change machines with `shoal cluster add` and `remove`.\n"

Hostname = Annotated[str, Field(pattern=HOSTNAME_PATTERN)]
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]


class HostRole(StrEnum):
    CONTROLLER = "controller"
    DATABASE = "database"
    WORKER = "worker"


class InventoryModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Gpus(InventoryModel):
    """GPUs of one kind on one machine, as device files: what `gres.conf` declares."""

    kind: Annotated[str, Field(pattern=r"^[a-z0-9_]{0,40}$")] = ""
    files: tuple[Annotated[str, Field(pattern=r"^/dev/[A-Za-z0-9/_-]+$")], ...]


class DetectedHardware(InventoryModel):
    """The hardware that was detected. It is saved, so that a machine that is away for a while stays
    declared.
    """

    hostname: Hostname
    address: Annotated[str, Field(pattern=ADDRESS_PATTERN)]
    sockets: Annotated[int, Field(strict=True, ge=1)]
    cores: Annotated[int, Field(strict=True, ge=1)]
    threads: Annotated[int, Field(strict=True, ge=1)]
    memory_mib: Annotated[int, Field(strict=True, ge=1)]
    gpus: tuple[Gpus, ...] = ()
    cgroup: Literal["", "v1", "v2"] = ""
    """The cgroup version; "" if there is none that can be written, or if it is not known."""

    @property
    def cpus(self) -> int:
        return self.sockets * self.cores * self.threads


class InventoryHost(InventoryModel):
    """One machine. `name` is Slurm's name for it; without one, its own host name."""

    address: Annotated[str, Field(pattern=ADDRESS_PATTERN)]
    name: Hostname | None = None
    user: Annotated[str, Field(pattern=USER_PATTERN)] | None = None
    port: Port | None = None
    jump: Annotated[str, Field(pattern=JUMP_PATTERN)] | None = None
    inside: Annotated[str, Field(pattern=ADDRESS_PATTERN)] | None = None
    switch: Hostname = "default"
    roles: tuple[HostRole, ...] = (HostRole.WORKER,)
    hardware: DetectedHardware | None = None
    is_unclean: bool = False
    """It has left, but Shoal's files are still there: it stays on the list to be removed again."""
    is_going: bool = False
    """A member on which `destroy` began and did not finish. Only the machine knows what is left."""

    @property
    def label(self) -> str:
        return self.name or (self.hardware.hostname if self.hardware else self.address)

    def has(self, role: HostRole) -> bool:
        return role in self.roles


class Inventory(InventoryModel):
    """A cluster: its machines, and settings of `slurm.conf` that override Shoal's own."""

    cluster: Annotated[str, Field(pattern=NAME_PATTERN)]
    id: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")] = ""
    """Distinguishes it from another cluster of that name. Empty if an older Shoal made it, until `create` or
    `add`.
    """
    provider: Literal["ssh"] = "ssh"
    identity: str | None = None
    known_hosts: str | None = None
    keeps_munge_key: bool = False
    """The controller had a munge key, and `--existing keep` kept it."""
    shared: Annotated[str, Field(pattern=SHARED_PATTERN)] | None = None
    """A directory that all machines share. Shoal checks it on each and never makes, mounts or removes it."""
    hosts: tuple[InventoryHost, ...]
    slurm: Mapping[Annotated[str, Field(pattern=SETTING_PATTERN)], str | int] = {}

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if not self.hosts:
            raise ValueError("needs at least one host")
        # Before the roles: otherwise a controller that is named twice would count as two controllers.
        labels = [host.label for host in self.hosts]
        for names in (labels, [host.address for host in self.hosts]):
            if twice := sorted({item for item in names if names.count(item) > 1}):
                raise ValueError(f"names {', '.join(twice)} twice; every machine is listed once")
        for role in (HostRole.CONTROLLER, HostRole.DATABASE):
            if (count := sum(host.has(role) for host in self.hosts)) != 1:
                raise ValueError(f"needs exactly one host with the role `{role}`, not {count}")
        if wrong := [key for key, value in self.slurm.items() if len(str(value).splitlines()) > 1]:
            raise ValueError(f"`slurm.{wrong[0]}` has more than one line")
        return self

    @property
    def claim(self) -> str:
        """Return the record by which its machines know their cluster."""
        return f"{self.cluster} {self.id}".rstrip()

    def with_id(self) -> Inventory:
        """Return the same cluster, with an id. Save it before a machine gets the id."""
        return self if self.id else self.model_copy(update={"id": randomness.token_hex(16)})

    @property
    def controller(self) -> InventoryHost:
        return next(host for host in self.hosts if host.has(HostRole.CONTROLLER))

    @property
    def database(self) -> InventoryHost:
        return next(host for host in self.hosts if host.has(HostRole.DATABASE))

    @property
    def members(self) -> tuple[InventoryHost, ...]:
        """The machines that are or will be nodes. A machine that left returns only by being added."""
        return tuple(host for host in self.hosts if not host.is_unclean)

    def host(self, ref: str) -> InventoryHost:
        """Return the machine with this name or address."""
        for host in self.hosts:
            if ref in {host.address, host.name, host.label}:
                return host
        labels = ", ".join(host.label for host in self.hosts)
        raise NotFound(
            f"cluster `{self.cluster}` has no machine `{ref}`; it has {labels}",
            hint=f"shoal cluster show --cluster {self.cluster}",
        )

    def marked_for_destroy(self) -> Inventory:
        """Return the same cluster, marked as being destroyed. Save it before a machine loses anything."""
        return self.with_hosts(
            host.model_copy(update={"is_going": host.hardware is not None}) for host in self.hosts
        )

    def with_hardware(self, hardware: Mapping[str, DetectedHardware]) -> Inventory:
        """Return the same machines with the hardware just detected, by address."""
        return self.with_hosts(
            host.model_copy(update={"hardware": hardware.get(host.address, host.hardware)})
            for host in self.hosts
        )

    def with_hosts(self, hosts: Iterable[InventoryHost]) -> Inventory:
        """Return the same cluster with these machines. Raise `SpecError` if they cannot form one."""
        data = {**self.model_dump(), "hosts": [host.model_dump() for host in hosts]}
        return build_inventory(data, f"cluster `{self.cluster}`")


def parse_hosts(
    text: str, *, user: str | None, port: int | None, jump: str | None
) -> tuple[InventoryHost, ...]:
    """Parse machines: `a,ana@b,c:2222`. Raise `SpecError` with every item that cannot be an address."""
    hosts: list[InventoryHost] = []
    problems: list[str] = []
    for item in (piece.strip() for piece in text.split(",")):
        match = re.fullmatch(r"(?:([^@\s]+)@)?(\[[0-9A-Fa-f:.%]+\]|[^@:\s\[\]]+)(?::(\d{1,5}))?", item)
        if match is None:
            problems.append(f"`{item}` in `--hosts` is not a machine; write `[USER@]ADDRESS[:PORT]`")
            continue
        given_user, address, given_port = match.groups()
        try:
            hosts.append(
                InventoryHost(
                    address=address.strip("[]"),
                    user=given_user or user,
                    port=int(given_port) if given_port else port,
                    jump=jump,
                )
            )
        except ValidationError as wrong:
            problems += [f"`{item}` in `--hosts`: {sentence}" for sentence in validation_messages(wrong)]
    if problems:
        raise SpecError(
            problems[0], problems=tuple(problems), hint="--hosts node1,node2,ubuntu@10.0.0.7:2222"
        )
    return tuple(hosts)


def with_roles(
    hosts: tuple[InventoryHost, ...], *, controller: str | None, is_worker: bool
) -> tuple[InventoryHost, ...]:
    """Return the same machines; the controller, by default the first, is also the database."""
    chosen = controller or hosts[0].address
    if chosen not in {host.address for host in hosts}:
        raise SpecError(
            f"`--controller {chosen}` is not one of the machines in `--hosts`",
            hint=f"--controller {hosts[0].address}",
        )
    both = (HostRole.CONTROLLER, HostRole.DATABASE, *((HostRole.WORKER,) if is_worker else ()))
    return tuple(
        host.model_copy(update={"roles": both}) if host.address == chosen else host for host in hosts
    )


def build_inventory(data: Mapping[str, Any], source: str) -> Inventory:
    """Build the inventory from plain data. Raise `SpecError` with every mistake."""
    try:
        return Inventory.model_validate(data)
    except ValidationError as wrong:
        problems = tuple(f"{source}: {sentence}" for sentence in validation_messages(wrong))
        raise SpecError(problems[0], problems=problems, hint="see docs/guides/cluster.md") from None


def validation_messages(wrong: ValidationError) -> list[str]:
    """Return one line for each mistake that validation found: where, what, and the value seen."""
    lines = []
    for item in wrong.errors(include_url=False):
        place = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        shown = item["input"]
        seen = f", not `{shown}`" if isinstance(shown, str | int | float | bool) else ""
        lines.append(f"`{place}`: {message}{seen}" if place else message)
    return lines


def load(path: Path) -> Inventory:
    """Load the inventory from a file. Raise `NotFound` without one, `SpecError` if it is wrong."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFound(f"no inventory at {path}", hint="shoal cluster create --hosts a,b,c") from None
    except (yaml.YAMLError, UnicodeDecodeError) as wrong:
        raise SpecError(f"{path}: {' '.join(str(wrong).split())}", hint=f"mend {path}") from None
    if not isinstance(data, dict):
        raise SpecError(f"{path}: an inventory is a mapping with `cluster` and `hosts`", hint=f"fix {path}")
    return build_inventory(data, str(path))


def save(inventory: Inventory, path: Path) -> None:
    """Write it whole or not at all, readable only by its owner."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    data = inventory.model_dump(mode="json", exclude_defaults=True)
    fresh = path.with_suffix(".new")
    with os.fdopen(
        os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8"
    ) as file:
        file.write(HEAD + yaml.safe_dump(data, sort_keys=False))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def inventory_path(home: Path, cluster: str) -> Path:
    """Return the path of a cluster's inventory."""
    if not re.fullmatch(NAME_PATTERN, cluster):
        raise SpecError(f"`{cluster}` is not a cluster name: a-z, 0-9 and `-`, at most 39", hint="--name lab")
    return home / "clusters" / f"{cluster}.yaml"


def list_clusters(home: Path) -> list[str]:
    return sorted(path.stem for path in (home / "clusters").glob("*.yaml"))


def resolve_cluster(home: Path, cluster: str | None, flag: str = "--cluster") -> str:
    """Return the cluster named by this flag, or the only cluster there is."""
    clusters = list_clusters(home)
    if cluster is not None:
        if cluster not in clusters:
            raise NotFound(
                f"no cluster `{cluster}`; there is {', '.join(clusters) or 'none'}", hint="shoal cluster"
            )
        return cluster
    if not clusters:
        raise NotFound("there is no cluster yet", hint="shoal cluster create --hosts a,b,c")
    if len(clusters) > 1:
        raise StateError(
            f"there are several clusters: {', '.join(clusters)}", hint=f"add `{flag} {clusters[0]}`, say"
        )
    return clusters[0]
