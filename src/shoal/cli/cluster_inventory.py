"""Which cluster a command is about: as it is kept, or as it is typed; and one change at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import SpecError, StateError
from shoal.home import home_from_env

if TYPE_CHECKING:
    from shoal.cluster.inventory import Inventory


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


def saved(cluster: str | None) -> tuple[Inventory, Path]:
    from shoal.cluster.inventory import load, path_of, the_cluster

    home = home_from_env()
    path = path_of(home, the_cluster(home, cluster))
    return load(path), path


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
        return saved(name)
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
        return asked, path
    old, new = ({host.address for host in item.hosts} for item in (kept, asked))
    if old != new:
        more, fewer = sorted(new - old), sorted(old - new)
        raise StateError(
            f"cluster `{asked.cluster}` is there already, with {', '.join(sorted(old))}",
            hint=f"shoal cluster add {','.join(more)}" if more else f"shoal cluster remove {','.join(fewer)}",
        )
    found = {host.address: host.found for host in kept.hosts if host.found}
    same = asked.with_found(found)
    told = {
        name: getattr(same, name) or getattr(kept, name) for name in ("identity", "known_hosts", "shared")
    }
    return same.model_copy(update={"keeps_munge_key": kept.keeps_munge_key, **told}), path


def reached(
    inventory: Inventory, identity: str | None, known_hosts: Path | None, shared: str | None
) -> Inventory:
    """The inventory with what was named, so that no later command has to name it again."""
    from shoal.cluster.inventory import make

    told: dict[str, str] = {}
    if identity:
        told["identity"] = str(Path(identity).expanduser().absolute())
    if known_hosts:
        told["known_hosts"] = str(known_hosts.expanduser().absolute())
    if shared:
        told["shared"] = shared.rstrip("/")
    return make({**inventory.model_dump(), **told}, "shoal cluster create")
