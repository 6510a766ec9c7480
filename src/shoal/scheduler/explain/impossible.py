"""Requests that no set of this cluster's nodes could ever hold: what is too much, and what to write instead.

The answers do not depend on what is free, open or excluded. An impossible request stays impossible until
nodes are added.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from shoal.model.job import ResourceRequest
from shoal.scheduler.explain.text import (
    bytes_text,
    joined,
    listed,
    need_text,
    node_count_text,
    number_of,
    quoted,
    thousandths,
    topology_text,
)
from shoal.scheduler.facts.amounts import MILLI, Demand, Need, NodeResources, demand_of
from shoal.scheduler.facts.capacity import Capacity, NodeUse
from shoal.scheduler.facts.plan import Explanation, WaitReason
from shoal.scheduler.facts.snapshot import NodeInfo
from shoal.scheduler.placement.feasibility import Feasibility, can_hold, largest_gang
from shoal.scheduler.placement.fit import SHORTAGE_KINDS, shortages

NODES_HINT = "see what there is with `shoal nodes`"


def explain_impossible(request: ResourceRequest, nodes: Iterable[NodeInfo]) -> Explanation | None:
    """Return why `request` can never run on `nodes`, or None. The ids of the explanation are empty.

    With no nodes at all the answer is None: a cluster that is still starting refuses no job.
    """
    capacity = Capacity(nodes)
    if not capacity.nodes:
        return None
    return never_fits(demand_of(request), Feasibility(capacity))


def missing_nodes_text(
    request: ResourceRequest, nodes: Iterable[NodeInfo], gone_nodes: Iterable[NodeInfo]
) -> str:
    """Name the gone nodes on which `request` could have run, with or without those that are listed, as the
    end of a sentence.

    Empty if it could not have run there.
    """
    demand = demand_of(request)
    listed_nodes, gone = (
        Feasibility(Capacity(views)).suitable(demand.need).nodes for views in (nodes, gone_nodes)
    )
    if not can_hold(demand, [*listed_nodes, *gone]):
        return ""
    return f"{listed([node.name for node in gone])} would do, which the cluster lists no more"


def never_fits(demand: Demand, feasibility: Feasibility) -> Explanation | None:
    """Return the same for a demand, over the nodes of a cycle."""
    nodes = feasibility.suitable(demand.need).nodes
    if can_hold(demand, nodes):
        return None
    if not nodes and demand.need.labels and feasibility.suitable(demand.need._replace(labels=())).nodes:
        return _no_such_label(demand, feasibility)
    if not nodes:
        return _too_large(demand, feasibility)
    if len(nodes) < demand.min_nodes:
        return _too_many(demand, feasibility, len(nodes))
    return _too_close(demand, feasibility, nodes)


def _never_fits_explanation(sentence: str, hint: str, **facts: object) -> Explanation:
    return Explanation(
        attempt_id="", job_id="", why=WaitReason.NEVER_FITS, sentence=sentence, hint=hint, facts=facts
    )


def _too_large(demand: Demand, feasibility: Feasibility) -> Explanation:
    """Explain a need that no single node could give: the first amount that is too much everywhere, or else
    the combination.
    """
    need, sizes = demand.need, feasibility.node_sizes()
    missing = [set(shortages(need, whole, whole)) for whole in sizes]
    everywhere = set.intersection(*missing)
    if "gpus" in everywhere and need.gpu_kind and not any(size.gpus_of(need.gpu_kind) for size in sizes):
        return _unknown_kind(demand, feasibility)
    for resource in SHORTAGE_KINDS:
        if resource in everywhere:
            return _too_much(demand, feasibility, resource)
    together = feasibility.distinguishing_amounts(need)
    return _never_fits_explanation(
        f"asks for {need_text(need, together)} on one node; no node has that together",
        NODES_HINT,
        asked=list(together),
    )


def _too_much(demand: Demand, feasibility: Feasibility, resource: str) -> Explanation:
    need = demand.need
    counts = {whole: _amount_of(whole, resource, need.gpu_kind) for whole in feasibility.node_sizes()}
    largest = max(counts.values())
    if resource == "gpus" and not largest and (kinds := _kinds(feasibility)):
        return _only_slices(need, kinds)
    pools = set().union(*(feasibility.pools(whole) for whole, count in counts.items() if count == largest))
    where = f"the largest node in pool `{min(pools)}` has" if len(pools) == 1 else "the largest node has"
    largest_text = {
        "gpus": str(largest),
        "cpus": thousandths(largest),
        "memory": bytes_text(largest),
        "disk": bytes_text(largest),
    }
    has = (
        f"{where} {largest_text[resource]}"
        if largest
        else f"no node has {'a GPU' if resource == 'gpus' else 'any'}"
    )
    hint = None
    if resource == "gpus" and largest:
        most = f"set `gpus: {_gpus(need, largest)}`, the most on one node"
        hint = _spread(demand, feasibility, largest) or most
    return _never_fits_explanation(
        f"asks for {need_text(need, [resource])} on one node; {has}",
        f"{hint}, or {NODES_HINT}" if hint else NODES_HINT,
        asked=[resource],
        largest=largest,
        pools=sorted(pools),
    )


def _amount_of(whole: NodeResources, resource: str, kind: str | None) -> int:
    counts = (whole.gpus_of(kind), whole.millicpus, whole.memory_bytes, whole.disk_bytes)
    return counts[SHORTAGE_KINDS.index(resource)]


def _spread(demand: Demand, feasibility: Feasibility, largest: int) -> str | None:
    """Suggest the same number of GPUs, spread evenly over more nodes, if that could run."""
    need = demand.need
    total = need.num_gpus * demand.min_nodes
    nodes = -(-total // largest)
    gpus, remainder = divmod(total, nodes)
    if remainder:
        return None
    # If a spec leaves CPUs out, they follow the GPUs, so they shrink with the GPUs here.
    smaller = need._replace(num_gpus=gpus, millicpus=need.millicpus * gpus // need.num_gpus)
    spread = demand._replace(need=smaller, min_nodes=nodes, max_nodes=nodes)
    if not can_hold(spread, feasibility.suitable(smaller).nodes):
        return None
    return f"set `gpus: {_gpus(need, gpus)}` and `nodes: {nodes}`"


def _gpus(need: Need, count: int) -> str:
    """Return the GPUs as a spec writes them."""
    return f"{need.gpu_kind}:{count}" if need.gpu_kind else str(count)


def _only_slices(need: Need, kinds: list[str]) -> Explanation:
    return _never_fits_explanation(
        f"asks for {need_text(need, ['gpus'])} on one node; no node has a whole GPU, "
        f"this cluster has the slices {joined(quoted(kinds))}",
        f"set `gpus: {kinds[0]}`, or {NODES_HINT}",
        asked=["gpus"],
        kinds=kinds,
    )


def _kinds(feasibility: Feasibility) -> list[str]:
    return sorted({name for whole in feasibility.node_sizes() for name, _ in whole.gpus})


def _unknown_kind(demand: Demand, feasibility: Feasibility) -> Explanation:
    kind, count = demand.need.gpu_kind or "", demand.need.num_gpus
    kinds = _kinds(feasibility)
    request = f"{number_of(count, 'GPU')} of kind `{kind}`"
    if demand.need.gpu_milli < MILLI:
        request = need_text(demand.need, ["gpus"])
    by_folded = {name.casefold(): name for name in kinds}
    similar = [by_folded[name] for name in get_close_matches(kind.casefold(), by_folded, n=1)]
    available = f"this cluster has {joined(quoted(kinds))}" if kinds else "no node has a GPU"
    return _never_fits_explanation(
        f"asks for {request}; {available}",
        f"set `gpus: {similar[0]}:{count}`, or {NODES_HINT}" if similar else NODES_HINT,
        asked=["gpus"],
        kinds=kinds,
    )


def _too_many(demand: Demand, feasibility: Feasibility, there: int) -> Explanation:
    need_description = need_text(demand.need, feasibility.distinguishing_amounts(demand.need))
    return _never_fits_explanation(
        f"asks for {node_count_text(demand)} with {need_description}; this cluster has {there}",
        f"set `nodes: {there}`, or {NODES_HINT}",
        asked=["nodes"],
        nodes_needed=demand.min_nodes,
        largest=there,
    )


def _no_such_label(demand: Demand, feasibility: Feasibility) -> Explanation:
    need = demand.need
    others = feasibility.suitable(need._replace(labels=())).nodes
    missing = []
    for name, value in need.labels:
        values = sorted({label for node in others if (label := node.label(name)) is not None})
        if value not in values:
            has = f"they have {listed(quoted(values))}" if values else "none has that label"
            missing.append(f"of `{name}: {value}` there is none: {has}")
    need_description = need_text(need._replace(labels=()), feasibility.distinguishing_amounts(need))
    return _never_fits_explanation(
        f"asks for nodes with {need_description} that have {joined(_labels(need))}; "
        f"{'; '.join(missing) or 'no node has all of that'}",
        f"change `require`, or {NODES_HINT}",
        asked=["require"],
        require=dict(need.labels),
    )


def _labels(need: Need) -> list[str]:
    return [f"`{name}: {value}`" for name, value in need.labels]


def _too_close(demand: Demand, feasibility: Feasibility, nodes: list[NodeUse]) -> Explanation:
    label = (demand.within if demand.is_close_required else demand.spread) or ""
    largest = largest_gang(demand, nodes)
    need_description = need_text(demand.need, feasibility.distinguishing_amounts(demand.need))
    most = f"at most {largest} can be so" if demand.spread else f"the largest has {largest}"
    problem = most if largest else f"no such node has the label `{label}`"
    fewer = [f"`nodes: {largest}`"] if largest else []
    looser = ["`topology.mode: preferred`"] if demand.can_be_looser else []
    return _never_fits_explanation(
        f"asks for {node_count_text(demand)} with {need_description}{topology_text(demand)}; {problem}",
        f"set {' or '.join(fewer + looser)}"
        if fewer or looser
        else f"leave `topology.spread` out, or {NODES_HINT}",
        asked=["topology"],
        nodes_needed=demand.min_nodes,
        largest=largest,
        within=label,
    )
