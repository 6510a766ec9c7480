"""Which cluster a command is about: the saved inventory, or the typed one; one change at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import SpecError, StateError
from shoal.home import home_from_env

if TYPE_CHECKING:
    from shoal.cluster.inventory import Inventory, InventoryHost


@contextmanager
def exclusive_change(*, is_dry: bool) -> Iterator[None]:
    """Lock this home's clusters: a second command would use an inventory that is about to change."""
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


def load_saved(cluster: str | None, flag: str = "--cluster") -> tuple[Inventory, Path]:
    from shoal.cluster.inventory import inventory_path, load, resolve_cluster

    home = home_from_env()
    path = inventory_path(home, resolve_cluster(home, cluster, flag))
    return load(path), path


def existing_cluster(path: Path) -> Inventory | None:
    """Return the saved inventory, if the cluster was ever created."""
    from shoal.cluster.inventory import load

    kept = load(path) if path.exists() else None
    return kept if kept and any(host.hardware for host in kept.hosts) else None


def save_or_drop(inventory: Inventory | None, path: Path) -> None:
    from shoal.cluster.inventory import save

    if inventory is None:
        path.unlink(missing_ok=True)
    else:
        save(inventory, path)


def requested_inventory(
    hosts: str | None,
    file: Path | None,
    name: str | None,
    controller: str | None,
    controller_works: bool,
    user: str | None,
    port: int | None,
    jump: str | None,
) -> tuple[Inventory, Path]:
    """Return the requested inventory and its path. A cluster that exists must have the same machines."""
    from shoal.cluster.inventory import build_inventory, inventory_path, load, parse_hosts, with_roles

    if hosts is None and file is None:
        return load_saved(name, "--name")
    if hosts is not None and file is not None:
        raise SpecError("`--hosts` and `--file` both name machines", hint="leave one of them out")
    if file is not None:
        requested = load(file)
    else:
        typed = with_roles(
            parse_hosts(hosts or "", user=user, port=port, jump=jump),
            controller=controller,
            is_worker=controller_works,
        )
        data = {"cluster": name or "shoal", "hosts": [host.model_dump() for host in typed]}
        requested = build_inventory(data, "shoal cluster create")
    path = inventory_path(home_from_env(), requested.cluster)
    if not path.exists():
        return requested, path
    kept = load(path)
    if not any(host.hardware for host in kept.hosts):
        return requested.model_copy(update={"id": requested.id or kept.id}), path
    old, new = ({host.address for host in item.hosts} for item in (kept, requested))
    if old != new:
        more, fewer = sorted(new - old), sorted(old - new)
        add = f"`shoal cluster add {','.join(more)} --cluster {requested.cluster}`"
        remove = f"`shoal cluster remove {','.join(fewer)} --cluster {requested.cluster}`"
        raise StateError(
            f"cluster `{requested.cluster}` exists already, with {', '.join(sorted(old))}",
            hint=add if more else remove,
        )
    if file is None:
        _refuse_moved_roles(kept, controller, is_worker=controller_works)
        return _with_connection_options(kept, requested), path
    _refuse_moved_roles(kept, requested.controller.address, requested.database.address)
    marked = [host.model_dump() for host in _with_leave_marks(requested.hosts, kept)]
    same = build_inventory({**requested.model_dump(), "hosts": marked}, str(file))
    same = same.with_hardware({host.address: host.hardware for host in kept.hosts if host.hardware})
    changes = {
        name: getattr(same, name) or getattr(kept, name) for name in ("identity", "known_hosts", "shared")
    }
    changes |= {"id": kept.id or same.id, "keeps_munge_key": kept.keeps_munge_key}
    return same.model_copy(update=changes), path


def _refuse_moved_roles(
    kept: Inventory, controller: str | None, database: str | None = None, *, is_worker: bool = True
) -> None:
    """Refuse to move the controller or the database: a cluster's queue and accounting would start empty."""
    hint = f"leave that out; to start over: shoal cluster destroy --cluster {kept.cluster}"
    for role, now, requested in (
        ("controller", kept.controller, controller),
        ("database", kept.database, database),
    ):
        if requested not in {None, now.address}:
            raise StateError(
                f"the {role} of cluster `{kept.cluster}` is {now.address}, and cannot move to {requested}",
                hint=hint,
            )
    if not is_worker and "worker" in kept.controller.roles:
        raise StateError(
            f"the controller of cluster `{kept.cluster}` runs jobs, too, since it was created",
            hint=hint,
        )


def _with_connection_options(kept: Inventory, requested: Inventory) -> Inventory:
    """Return the saved cluster, in its own order, with the typed login options of its machines."""
    typed = {host.address: host.model_dump(include={"user", "port", "jump"}) for host in requested.hosts}
    return kept.with_hosts(
        host.model_copy(update={key: way for key, way in typed[host.address].items() if way})
        for host in kept.hosts
    )


def _with_leave_marks(hosts: Iterable[InventoryHost], kept: Inventory) -> tuple[InventoryHost, ...]:
    """Keep the marks of machines that left (`is_unclean`, with their name) or are leaving (`is_going`)."""
    left = {host.address: {"name": host.name, "is_unclean": True} for host in kept.hosts if host.is_unclean}
    left |= {host.address: {"is_unclean": False, "is_going": True} for host in kept.hosts if host.is_going}
    neither = {"is_unclean": False, "is_going": False}
    return tuple(host.model_copy(update=left.get(host.address, neither)) for host in hosts)


def split_joining(
    inventory: Inventory, typed: tuple[InventoryHost, ...]
) -> tuple[Inventory, tuple[InventoryHost, ...]]:
    """Return the cluster without the machines that are to join it, and those machines. A machine that never
    joined counts as new; one that was not cleaned stays marked until it has joined.
    """
    from shoal.cluster.inventory import HostRole

    members = {host.address for host in inventory.hosts if host.hardware or host.roles != (HostRole.WORKER,)}
    new = _with_leave_marks((host for host in typed if host.address not in members), inventory)
    again = {host.address for host in new}
    return inventory.with_hosts(host for host in inventory.hosts if host.address not in again), new


def with_access(
    inventory: Inventory, identity: str | None, known_hosts: Path | None, shared: str | None
) -> Inventory:
    """Return the inventory with these options, so that later commands need not name them again."""
    from shoal.cluster.inventory import build_inventory

    options: dict[str, str] = {}
    if identity:
        options["identity"] = str(Path(identity).expanduser().absolute())
        if not Path(options["identity"]).is_file():
            raise SpecError(f"there is no key file {identity} here", hint="name one of yours: `ls ~/.ssh`")
    if known_hosts:
        options["known_hosts"] = str(known_hosts.expanduser().absolute())
    if shared:
        options["shared"] = shared.rstrip("/")
    return build_inventory({**inventory.model_dump(), **options}, "shoal cluster create")
