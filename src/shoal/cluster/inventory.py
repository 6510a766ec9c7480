"""The inventory: which machines are a cluster, how to reach each, and what each is for. One YAML file.

It is written by `create`, changed by `add` and `remove`, and read by everything else. `provider` is the seat
for clusters that a cloud makes (AWS ParallelCluster, Google Cluster Toolkit): only `ssh` is there today.
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
"""Slurm lower-cases cluster names; MariaDB and file names take these as they are."""
HOSTNAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9-]{0,62}$"
USER_PATTERN = r"^[a-z_][a-z0-9_-]{0,31}$"
ADDRESS_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9.:%-]{0,252}$"
JUMP_PATTERN = r"^([a-z_][a-z0-9_-]{0,31}@)?[A-Za-z0-9][A-Za-z0-9.-]{0,252}(:[0-9]{1,5})?$"
SHARED_PATTERN = r"^(/[A-Za-z0-9_][A-Za-z0-9._-]*)+$"
SETTING_PATTERN = r"^[A-Za-z][A-Za-z0-9]{1,63}$"

HEAD = "# Written by `shoal cluster`. Change machines with `shoal cluster add` and `remove`.\n"

Hostname = Annotated[str, Field(pattern=HOSTNAME_PATTERN)]
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]


class Role(StrEnum):
    CONTROLLER = "controller"
    DATABASE = "database"
    WORKER = "worker"


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Gpus(Part):
    """GPUs of one kind on one machine, as device files: what `gres.conf` declares."""

    kind: Annotated[str, Field(pattern=r"^[a-z0-9_]{0,40}$")] = ""
    files: tuple[Annotated[str, Field(pattern=r"^/dev/[A-Za-z0-9/_-]+$")], ...]


class Found(Part):
    """What a machine turned out to be. Kept, so that one that is away for a while stays declared."""

    hostname: Hostname
    address: Annotated[str, Field(pattern=ADDRESS_PATTERN)]
    sockets: Annotated[int, Field(strict=True, ge=1)]
    cores: Annotated[int, Field(strict=True, ge=1)]
    threads: Annotated[int, Field(strict=True, ge=1)]
    memory_mib: Annotated[int, Field(strict=True, ge=1)]
    gpus: tuple[Gpus, ...] = ()
    cgroup: Literal["", "v1", "v2"] = ""
    """The version it has; empty where there are none that can be written, or nobody knows."""

    @property
    def cpus(self) -> int:
        return self.sockets * self.cores * self.threads


class Host(Part):
    """One machine. `name` is Slurm's name for it: without one, what the machine calls itself."""

    address: Annotated[str, Field(pattern=ADDRESS_PATTERN)]
    name: Hostname | None = None
    user: Annotated[str, Field(pattern=USER_PATTERN)] | None = None
    port: Port | None = None
    jump: Annotated[str, Field(pattern=JUMP_PATTERN)] | None = None
    inside: Annotated[str, Field(pattern=ADDRESS_PATTERN)] | None = None
    switch: Hostname = "default"
    roles: tuple[Role, ...] = (Role.WORKER,)
    found: Found | None = None
    is_unclean: bool = False
    """It has left, and what Shoal put there is there yet: it stays on the list to be removed again."""
    is_going: bool = False
    """A member on which `destroy` has begun, and did not finish: what is there yet, only it can say."""

    @property
    def label(self) -> str:
        return self.name or (self.found.hostname if self.found else self.address)

    def has(self, role: Role) -> bool:
        return role in self.roles


class Inventory(Part):
    """A cluster: its machines, and settings of `slurm.conf` that are put over Shoal's own."""

    cluster: Annotated[str, Field(pattern=NAME_PATTERN)]
    id: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")] = ""
    """Tells it from another of that name. Empty where an older Shoal made it, until `create` or `add`."""
    provider: Literal["ssh"] = "ssh"
    identity: str | None = None
    known_hosts: str | None = None
    keeps_munge_key: bool = False
    """The controller had a munge key, and was told to keep it."""
    shared: Annotated[str, Field(pattern=SHARED_PATTERN)] | None = None
    """A directory that all machines have: looked at on each, never made, mounted or removed."""
    hosts: tuple[Host, ...]
    slurm: Mapping[Annotated[str, Field(pattern=SETTING_PATTERN)], str | int] = {}

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if not self.hosts:
            raise ValueError("needs at least one host")
        # Before the roles: a controller that is named twice would be two of them.
        labels = [host.label for host in self.hosts]
        for known in (labels, [host.address for host in self.hosts]):
            if twice := sorted({item for item in known if known.count(item) > 1}):
                raise ValueError(f"names {', '.join(twice)} twice; every machine stands there once")
        for role in (Role.CONTROLLER, Role.DATABASE):
            if (count := sum(host.has(role) for host in self.hosts)) != 1:
                raise ValueError(f"needs exactly one host with the role `{role}`, not {count}")
        if wrong := [key for key, value in self.slurm.items() if len(str(value).splitlines()) > 1]:
            raise ValueError(f"`slurm.{wrong[0]}` has more than one line")
        return self

    @property
    def claim(self) -> str:
        """What its machines remember of whose they are."""
        return f"{self.cluster} {self.id}".rstrip()

    def identified(self) -> Inventory:
        """The same cluster, with an id. To be kept before a machine hears of it."""
        return self if self.id else self.model_copy(update={"id": randomness.token_hex(16)})

    @property
    def controller(self) -> Host:
        return next(host for host in self.hosts if host.has(Role.CONTROLLER))

    @property
    def database(self) -> Host:
        return next(host for host in self.hosts if host.has(Role.DATABASE))

    @property
    def members(self) -> tuple[Host, ...]:
        """The machines that are nodes, or shall be: one that has left comes back when it is added alone."""
        return tuple(host for host in self.hosts if not host.is_unclean)

    def host(self, ref: str) -> Host:
        """The machine with this name or address."""
        for host in self.hosts:
            if ref in {host.address, host.name, host.label}:
                return host
        known = ", ".join(host.label for host in self.hosts)
        raise NotFound(
            f"cluster `{self.cluster}` has no machine `{ref}`; it has {known}",
            hint=f"shoal cluster show --cluster {self.cluster}",
        )

    def going(self) -> Inventory:
        """The same cluster while it is being destroyed. To be kept before a machine loses anything."""
        return self.with_hosts(
            host.model_copy(update={"is_going": host.found is not None}) for host in self.hosts
        )

    def with_found(self, found: Mapping[str, Found]) -> Inventory:
        """The same machines, with what those asked just now turned out to be; by address."""
        return self.with_hosts(
            host.model_copy(update={"found": found.get(host.address, host.found)}) for host in self.hosts
        )

    def with_hosts(self, hosts: Iterable[Host]) -> Inventory:
        """The same cluster of these machines. Raises `SpecError` where they cannot be one."""
        data = {**self.model_dump(), "hosts": [host.model_dump() for host in hosts]}
        return make(data, f"cluster `{self.cluster}`")


def typed_hosts(text: str, *, user: str | None, port: int | None, jump: str | None) -> tuple[Host, ...]:
    """Machines as typed: `a,ana@b,c:2222`. Raises `SpecError` with every one that cannot be an address."""
    hosts: list[Host] = []
    problems: list[str] = []
    for item in (piece.strip() for piece in text.split(",")):
        found = re.fullmatch(r"(?:([^@\s]+)@)?(\[[0-9A-Fa-f:.%]+\]|[^@:\s\[\]]+)(?::(\d{1,5}))?", item)
        if found is None:
            problems.append(f"`{item}` in `--hosts` is no machine; write `[USER@]ADDRESS[:PORT]`")
            continue
        given_user, address, given_port = found.groups()
        try:
            hosts.append(
                Host(
                    address=address.strip("[]"),
                    user=given_user or user,
                    port=int(given_port) if given_port else port,
                    jump=jump,
                )
            )
        except ValidationError as wrong:
            problems += [f"`{item}` in `--hosts`: {sentence}" for sentence in sentences(wrong)]
    if problems:
        raise SpecError(
            problems[0], problems=tuple(problems), hint="--hosts node1,node2,ubuntu@10.0.0.7:2222"
        )
    return tuple(hosts)


def with_roles(hosts: tuple[Host, ...], *, controller: str | None, is_worker: bool) -> tuple[Host, ...]:
    """The same machines: one, the first unless named, is also controller and database."""
    chosen = controller or hosts[0].address
    if chosen not in {host.address for host in hosts}:
        raise SpecError(
            f"`--controller {chosen}` is none of the machines in `--hosts`",
            hint=f"--controller {hosts[0].address}",
        )
    both = (Role.CONTROLLER, Role.DATABASE, *((Role.WORKER,) if is_worker else ()))
    return tuple(
        host.model_copy(update={"roles": both}) if host.address == chosen else host for host in hosts
    )


def make(data: Mapping[str, Any], source: str) -> Inventory:
    """The inventory in plain data. Raises `SpecError` with every mistake."""
    try:
        return Inventory.model_validate(data)
    except ValidationError as wrong:
        told = tuple(f"{source}: {sentence}" for sentence in sentences(wrong))
        raise SpecError(told[0], problems=told, hint="see docs/guides/cluster.md") from None


def sentences(wrong: ValidationError) -> list[str]:
    """One line for each mistake that validation found: where, what, and the value seen."""
    lines = []
    for item in wrong.errors(include_url=False):
        place = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        shown = item["input"]
        seen = f", not `{shown}`" if isinstance(shown, str | int | float | bool) else ""
        lines.append(f"`{place}`: {message}{seen}" if place else message)
    return lines


def load(path: Path) -> Inventory:
    """The inventory in a file. Raises `NotFound` without one, `SpecError` when it is wrong."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFound(f"no inventory at {path}", hint="shoal cluster create --hosts a,b,c") from None
    except (yaml.YAMLError, UnicodeDecodeError) as wrong:
        raise SpecError(f"{path}: {' '.join(str(wrong).split())}", hint=f"mend {path}") from None
    if not isinstance(data, dict):
        raise SpecError(f"{path}: an inventory is a mapping with `cluster` and `hosts`", hint=f"mend {path}")
    return make(data, str(path))


def save(inventory: Inventory, path: Path) -> None:
    """Write it whole or not at all, readable to its owner alone."""
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


def path_of(home: Path, cluster: str) -> Path:
    """Where the inventory of a cluster is kept."""
    if not re.fullmatch(NAME_PATTERN, cluster):
        raise SpecError(
            f"`{cluster}` is no name of a cluster: a-z, 0-9 and `-`, at most 39", hint="--name lab"
        )
    return home / "clusters" / f"{cluster}.yaml"


def known_clusters(home: Path) -> list[str]:
    return sorted(path.stem for path in (home / "clusters").glob("*.yaml"))


def the_cluster(home: Path, cluster: str | None, flag: str = "--cluster") -> str:
    """The cluster that is meant: the one named, by this flag, or the only one there is."""
    known = known_clusters(home)
    if cluster is not None:
        if cluster not in known:
            raise NotFound(
                f"no cluster `{cluster}`; there is {', '.join(known) or 'none'}", hint="shoal cluster"
            )
        return cluster
    if not known:
        raise NotFound("there is no cluster yet", hint="shoal cluster create --hosts a,b,c")
    if len(known) > 1:
        raise StateError(
            f"there are several clusters: {', '.join(known)}", hint=f"add `{flag} {known[0]}`, say"
        )
    return known[0]
