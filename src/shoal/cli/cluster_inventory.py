"""Which cluster a command is about: as it is kept, or as it is typed; and one change at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import SpecError, StateError
from shoal.home import home_from_env

if TYPE_CHECKING:
    from shoal.cluster.inventory import Host, Inventory


@contextmanager
def alone(*, is_dry: bool) -> Iterator[None]:
    """One change of this home's clusters at a time: a second would go by an inventory that is soon old."""
    folder = home_from_env() / "clusters"
    if is_dry:
        yield
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateError(
                f"another `shoal cluster` is changing a cluster of {folder.parent} right now",
                hint="wait for it to end, then run the same command again",
            ) from None
        yield


def saved(cluster: str | None, flag: str = "--cluster") -> tuple[Inventory, Path]:
    from shoal.cluster.inventory import load, path_of, the_cluster

    home = home_from_env()
    path = path_of(home, the_cluster(home, cluster, flag))
    return load(path), path


def made_before(path: Path) -> Inventory | None:
    """The cluster that is kept there, if it was ever made."""
    from shoal.cluster.inventory import load

    kept = load(path) if path.exists() else None
    return kept if kept and any(host.found for host in kept.hosts) else None


def save_or_drop(inventory: Inventory | None, path: Path) -> None:
    from shoal.cluster.inventory import save

    if inventory is None:
        path.unlink(missing_ok=True)
    else:
        save(inventory, path)


def wanted(
    hosts: str | None,
    file: Path | None,
    name: str | None,
    controller: str | None,
    controller_works: bool,
    user: str | None,
    port: int | None,
    jump: str | None,
) -> tuple[Inventory, Path]:
    """The inventory that is asked for, and where it is kept. One that is kept already must be the same."""
    from shoal.cluster.inventory import load, make, path_of, typed_hosts, with_roles

    if hosts is None and file is None:
        return saved(name, "--name")
    if hosts is not None and file is not None:
        raise SpecError("`--hosts` and `--file` both say which machines", hint="leave one of them out")
    if file is not None:
        asked = load(file)
    else:
        typed = with_roles(
            typed_hosts(hosts or "", user=user, port=port, jump=jump),
            controller=controller,
            is_worker=controller_works,
        )
        data = {"cluster": name or "shoal", "hosts": [host.model_dump() for host in typed]}
        asked = make(data, "shoal cluster create")
    path = path_of(home_from_env(), asked.cluster)
    if not path.exists():
        return asked, path
    kept = load(path)
    if not any(host.found for host in kept.hosts):
        return asked.model_copy(update={"id": asked.id or kept.id}), path
    old, new = ({host.address for host in item.hosts} for item in (kept, asked))
    if old != new:
        more, fewer = sorted(new - old), sorted(old - new)
        add = f"`shoal cluster add {','.join(more)} --cluster {asked.cluster}`"
        remove = f"`shoal cluster remove {','.join(fewer)} --cluster {asked.cluster}`"
        raise StateError(
            f"cluster `{asked.cluster}` is there already, with {', '.join(sorted(old))}",
            hint=add if more else remove,
        )
    if file is None:
        _must_stay(kept, controller, is_worker=controller_works)
        return _with_ways(kept, asked), path
    _must_stay(kept, asked.controller.address, asked.database.address)
    marked = [host.model_dump() for host in _with_marks(asked.hosts, kept)]
    same = make({**asked.model_dump(), "hosts": marked}, str(file))
    same = same.with_found({host.address: host.found for host in kept.hosts if host.found})
    told = {
        name: getattr(same, name) or getattr(kept, name) for name in ("identity", "known_hosts", "shared")
    }
    told |= {"id": kept.id or same.id, "keeps_munge_key": kept.keeps_munge_key}
    return same.model_copy(update=told), path


def _must_stay(
    kept: Inventory, controller: str | None, database: str | None = None, *, is_worker: bool = True
) -> None:
    """A cluster's queue and accounting are where they are: asked for elsewhere, they would begin anew."""
    hint = f"leave that out; to begin anew: shoal cluster destroy --cluster {kept.cluster}"
    for role, now, asked in (
        ("controller", kept.controller, controller),
        ("database", kept.database, database),
    ):
        if asked not in {None, now.address}:
            raise StateError(
                f"the {role} of cluster `{kept.cluster}` is {now.address}, and cannot move to {asked}",
                hint=hint,
            )
    if not is_worker and "worker" in kept.controller.roles:
        raise StateError(
            f"jobs run on the controller of cluster `{kept.cluster}`, too, since it was made",
            hint=hint,
        )


def _with_ways(kept: Inventory, asked: Inventory) -> Inventory:
    """The cluster as it is kept, whatever the order typed: only the ways to its machines may be new."""
    typed = {host.address: host.model_dump(include={"user", "port", "jump"}) for host in asked.hosts}
    return kept.with_hosts(
        host.model_copy(update={key: way for key, way in typed[host.address].items() if way})
        for host in kept.hosts
    )


def _with_marks(hosts: Iterable[Host], kept: Inventory) -> tuple[Host, ...]:
    """Who has left and was not cleaned is so, and has the name by which it left, whatever is asked; and who
    is on its way out is that.
    """
    left = {host.address: {"name": host.name, "is_unclean": True} for host in kept.hosts if host.is_unclean}
    left |= {host.address: {"is_unclean": False, "is_going": True} for host in kept.hosts if host.is_going}
    neither = {"is_unclean": False, "is_going": False}
    return tuple(host.model_copy(update=left.get(host.address, neither)) for host in hosts)


def apart(inventory: Inventory, typed: tuple[Host, ...]) -> tuple[Inventory, tuple[Host, ...]]:
    """The cluster without those that are to join it, and those: one that never joined is new again, and one
    that was not cleaned is marked as that until it has joined.
    """
    from shoal.cluster.inventory import Role

    members = {host.address for host in inventory.hosts if host.found or host.roles != (Role.WORKER,)}
    new = _with_marks((host for host in typed if host.address not in members), inventory)
    again = {host.address for host in new}
    return inventory.with_hosts(host for host in inventory.hosts if host.address not in again), new


def reached(
    inventory: Inventory, identity: str | None, known_hosts: Path | None, shared: str | None
) -> Inventory:
    """The inventory with what was named, so that no later command has to name it again."""
    from shoal.cluster.inventory import make

    told: dict[str, str] = {}
    if identity:
        told["identity"] = str(Path(identity).expanduser().absolute())
        if not Path(told["identity"]).is_file():
            raise SpecError(f"there is no key {identity} here", hint="name one of yours: `ls ~/.ssh`")
    if known_hosts:
        told["known_hosts"] = str(known_hosts.expanduser().absolute())
    if shared:
        told["shared"] = shared.rstrip("/")
    return make({**inventory.model_dump(), **told}, "shoal cluster create")
