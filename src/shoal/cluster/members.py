"""What stays declared of a member that shows less than it joined with. Pure.

A lost GPU, or a driver that does not answer, is for somebody to mend: taken for the new truth, it would bring
the node that was drained for it back without. The same goes for a name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from shoal.cluster.inventory import Found, Host, Inventory


def declared_as(
    inventory: Inventory, seen: Mapping[str, Found], accepted: Collection[str]
) -> tuple[Inventory, list[str]]:
    """The inventory with what was seen, by address, and a sentence about what was not believed of a member.

    `accepted`: addresses of members that are taken as they are seen.
    """
    found, doubts = dict(seen), []
    for host in inventory.hosts:
        old, new = host.found, seen.get(host.address)
        if old is None or new is None or host.address in accepted:
            continue
        found[host.address], told = _kept(old, new)
        doubts += [_doubt(host, line, inventory) for line in told]
    return inventory.with_found(found), doubts


def _kept(old: Found, new: Found) -> tuple[Found, list[str]]:
    kept, told = new, []
    if _has_fewer(old, new):
        kept = kept.model_copy(update={"gpus": old.gpus})
        told.append(
            f"shows {_shown(new)} and stays declared with {_shown(old)}, as it joined: see `nvidia-smi`"
        )
    if new.hostname != old.hostname:
        kept = kept.model_copy(update={"hostname": old.hostname})
        told.append(
            f"calls itself `{new.hostname}` and stays declared as `{old.hostname}`, as it joined:"
            f" `hostnamectl set-hostname {old.hostname}`"
        )
    return kept, told


def _kinds(found: Found) -> Counter[str]:
    return Counter({gpus.kind: len(gpus.files) for gpus in found.gpus})


def _has_fewer(old: Found, new: Found) -> bool:
    """Fewer at all, or of a kind. A kind that was not known before is more, not less."""
    before, now = _kinds(old), _kinds(new)
    return now.total() < before.total() or any(now[kind] < num for kind, num in before.items() if kind)


def _shown(found: Found) -> str:
    kinds = [f"{num} {kind or 'of no known kind'}" for kind, num in _kinds(found).items()]
    return f"GPUs: {', '.join(kinds)}" if kinds else "no GPU"


def _doubt(host: Host, line: str, inventory: Inventory) -> str:
    accept = f"shoal cluster create --name {inventory.cluster} --as-found {host.label}"
    return f"{host.label} {line} there; if it is to be so, `{accept}`"
