"""Requests that no set of this cluster's nodes could ever hold: what is too much, and what to write instead.

Says nothing about what is free, open or excluded: an impossible request stays so until nodes are added.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from shoal.model.request import Request
from shoal.scheduler.amounts import MILLI, Amounts, Demand, Need, demand_of
from shoal.scheduler.capacity import Capacity, NodeUse
from shoal.scheduler.fit import SHORT_OF, shortages
from shoal.scheduler.possible import Possible, can_hold, most_together
from shoal.scheduler.snapshot import NodeView
from shoal.scheduler.types import Explanation, Why
from shoal.scheduler.words import (
    amounts,
    joined,
    listed,
    num_nodes,
    number_of,
    quoted,
    size,
    thousandths,
    together,
)

LOOK = "see what there is with `shoal nodes`"


def impossible(request: Request, nodes: Iterable[NodeView]) -> Explanation | None:
    """Why `request` can never run on `nodes`, or None. Its ids are empty.

    With no nodes at all the answer is None: a cluster that is still coming up refuses nobody.
    """
    capacity = Capacity(nodes)
    if not capacity.nodes:
        return None
    return never_fits(demand_of(request), Possible(capacity))


def missed(request: Request, nodes: Iterable[NodeView], gone: Iterable[NodeView]) -> str:
    """Which of the nodes that are gone `request` could have run on, with those that are there or without, as
    the end of a sentence; empty: it could not.
    """
    demand = demand_of(request)
    there, left = (Possible(Capacity(some)).suitable(demand.need).nodes for some in (nodes, gone))
    if not can_hold(demand, [*there, *left]):
        return ""
    return f"{listed([node.name for node in left])} would do, which the cluster lists no more"


def never_fits(demand: Demand, possible: Possible) -> Explanation | None:
    """The same for a demand, over the nodes of a cycle."""
    nodes = possible.suitable(demand.need).nodes
    if can_hold(demand, nodes):
        return None
    if not nodes and demand.need.labels and possible.suitable(demand.need._replace(labels=())).nodes:
        return _no_such_label(demand, possible)
    if not nodes:
        return _too_large(demand, possible)
    if len(nodes) < demand.min_nodes:
        return _too_many(demand, possible, len(nodes))
    return _too_close(demand, possible, nodes)


def _said(sentence: str, hint: str, **facts: object) -> Explanation:
    return Explanation(
        attempt_id="", job_id="", why=Why.NEVER_FITS, sentence=sentence, hint=hint, facts=facts
    )


def _too_large(demand: Demand, possible: Possible) -> Explanation:
    """No single node could give the need: the first amount that is too much everywhere, else the mix."""
    need, wholes = demand.need, possible.wholes()
    missing = [set(shortages(need, whole, whole)) for whole in wholes]
    everywhere = set.intersection(*missing)
    if "gpus" in everywhere and need.gpu_kind and not any(w.gpus_of(need.gpu_kind) for w in wholes):
        return _unknown_kind(demand, possible)
    for what in SHORT_OF:
        if what in everywhere:
            return _too_much(demand, possible, what)
    together = possible.telling(need)
    return _said(
        f"asks for {amounts(need, together)} on one node; no node has that together",
        LOOK,
        asked=list(together),
    )


def _too_much(demand: Demand, possible: Possible, what: str) -> Explanation:
    need = demand.need
    counts = {whole: _of(whole, what, need.gpu_kind) for whole in possible.wholes()}
    largest = max(counts.values())
    if what == "gpus" and not largest and (kinds := _kinds(possible)):
        return _only_slices(need, kinds)
    pools = set().union(*(possible.pools(whole) for whole, count in counts.items() if count == largest))
    where = f"the largest node in pool `{min(pools)}` has" if len(pools) == 1 else "the largest node has"
    told = {
        "gpus": str(largest),
        "cpus": thousandths(largest),
        "memory": size(largest),
        "disk": size(largest),
    }
    has = f"{where} {told[what]}" if largest else f"no node has {'a GPU' if what == 'gpus' else 'any'}"
    hint = None
    if what == "gpus" and largest:
        most = f"set `gpus: {_gpus(need, largest)}`, the most on one node"
        hint = _spread(demand, possible, largest) or most
    return _said(
        f"asks for {amounts(need, [what])} on one node; {has}",
        f"{hint}, or {LOOK}" if hint else LOOK,
        asked=[what],
        largest=largest,
        pools=sorted(pools),
    )


def _of(whole: Amounts, what: str, kind: str | None) -> int:
    counts = (whole.gpus_of(kind), whole.millicpus, whole.memory_bytes, whole.disk_bytes)
    return counts[SHORT_OF.index(what)]


def _spread(demand: Demand, possible: Possible, largest: int) -> str | None:
    """The same number of GPUs, evenly over more nodes, if that could run."""
    need = demand.need
    total = need.num_gpus * demand.min_nodes
    nodes = -(-total // largest)
    gpus, left = divmod(total, nodes)
    if left:
        return None
    # Where a spec leaves CPUs out they follow the GPUs, so they shrink with them here.
    smaller = need._replace(num_gpus=gpus, millicpus=need.millicpus * gpus // need.num_gpus)
    spread = demand._replace(need=smaller, min_nodes=nodes, max_nodes=nodes)
    if not can_hold(spread, possible.suitable(smaller).nodes):
        return None
    return f"set `gpus: {_gpus(need, gpus)}` and `nodes: {nodes}`"


def _gpus(need: Need, count: int) -> str:
    """As a spec writes them."""
    return f"{need.gpu_kind}:{count}" if need.gpu_kind else str(count)


def _only_slices(need: Need, kinds: list[str]) -> Explanation:
    return _said(
        f"asks for {amounts(need, ['gpus'])} on one node; no node has a whole GPU, "
        f"this cluster has the slices {joined(quoted(kinds))}",
        f"set `gpus: {kinds[0]}`, or {LOOK}",
        asked=["gpus"],
        kinds=kinds,
    )


def _kinds(possible: Possible) -> list[str]:
    return sorted({name for whole in possible.wholes() for name, _ in whole.gpus})


def _unknown_kind(demand: Demand, possible: Possible) -> Explanation:
    kind, count = demand.need.gpu_kind or "", demand.need.num_gpus
    kinds = _kinds(possible)
    asked = f"{number_of(count, 'GPU')} of kind `{kind}`"
    if demand.need.gpu_milli < MILLI:
        asked = amounts(demand.need, ["gpus"])
    by_folded = {name.casefold(): name for name in kinds}
    near = [by_folded[name] for name in get_close_matches(kind.casefold(), by_folded, n=1)]
    there = f"this cluster has {joined(quoted(kinds))}" if kinds else "no node has a GPU"
    return _said(
        f"asks for {asked}; {there}",
        f"set `gpus: {near[0]}:{count}`, or {LOOK}" if near else LOOK,
        asked=["gpus"],
        kinds=kinds,
    )


def _too_many(demand: Demand, possible: Possible, there: int) -> Explanation:
    such = amounts(demand.need, possible.telling(demand.need))
    return _said(
        f"asks for {num_nodes(demand)} with {such}; this cluster has {there}",
        f"set `nodes: {there}`, or {LOOK}",
        asked=["nodes"],
        nodes_needed=demand.min_nodes,
        largest=there,
    )


def _no_such_label(demand: Demand, possible: Possible) -> Explanation:
    need = demand.need
    others = possible.suitable(need._replace(labels=())).nodes
    told = []
    for name, value in need.labels:
        there = sorted({label for node in others if (label := node.label(name)) is not None})
        if value not in there:
            has = f"they have {listed(quoted(there))}" if there else "none has that label"
            told.append(f"of `{name}: {value}` there is none: {has}")
    such = amounts(need._replace(labels=()), possible.telling(need))
    return _said(
        f"asks for nodes with {such} that have {joined(_labels(need))}; "
        f"{'; '.join(told) or 'no node has all of that'}",
        f"change `require`, or {LOOK}",
        asked=["require"],
        require=dict(need.labels),
    )


def _labels(need: Need) -> list[str]:
    return [f"`{name}: {value}`" for name, value in need.labels]


def _too_close(demand: Demand, possible: Possible, nodes: list[NodeUse]) -> Explanation:
    label = (demand.within if demand.is_close_required else demand.spread) or ""
    largest = most_together(demand, nodes)
    such = amounts(demand.need, possible.telling(demand.need))
    most = f"at most {largest} can be so" if demand.spread else f"the largest has {largest}"
    there = most if largest else f"no such node has the label `{label}`"
    fewer = [f"`nodes: {largest}`"] if largest else []
    looser = ["`topology.mode: preferred`"] if demand.can_be_looser else []
    return _said(
        f"asks for {num_nodes(demand)} with {such}{together(demand)}; {there}",
        f"set {' or '.join(fewer + looser)}"
        if fewer or looser
        else f"leave `topology.spread` out, or {LOOK}",
        asked=["topology"],
        nodes_needed=demand.min_nodes,
        largest=largest,
        within=label,
    )
