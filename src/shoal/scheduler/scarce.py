"""Memory is what people do not see running out: who leaves it out takes it with their CPUs or GPUs.

Says how much a node has left, what took the most of it, and what to type. Names no job: that is read by
people of every project, and `shoal nodes NODE` shows them those they may know.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from shoal.scheduler.amounts import Need
from shoal.scheduler.capacity import NodeUse
from shoal.scheduler.fit import shortages
from shoal.scheduler.words import number_of, size

MIB = 1 << 20
NUM_LOOKED_AT = 256
"""Nodes: an explanation must not cost more than a plan."""


def short_of_memory(need: Need, nodes: Iterable[NodeUse]) -> NodeUse | None:
    """Of the nodes that lack nothing but memory for `need`, the one with the most left, or one of many."""
    looked_at = islice(nodes, NUM_LOOKED_AT)
    lacking = [node for node in looked_at if shortages(need, node.whole, node.free) == ("memory",)]
    return max(lacking, key=lambda node: (node.free.memory_bytes, node.name), default=None)


def memory_held(need: Need, node: NodeUse) -> str:
    """What is left of the node's memory, and where most of the rest is."""
    shares = [share for _, _, share in node.ends]
    largest = max(shares, key=lambda share: (share.memory_bytes, len(share.gpu_ids)))
    gpus = f"with {number_of(len(largest.gpu_ids), 'GPU')} " if largest.gpu_ids else ""
    took = f"{size(largest.memory_bytes)} went {gpus}to one job"
    whole = f"{_left(node)} of {size(node.whole.memory_bytes)} of memory is free, {took}"
    return f"{node.name}: {whole}; this job needs {size(need.memory_on(node.whole))}"


def less_memory(need: Need, node: NodeUse) -> str:
    """What to type to start on the node, or where to look when nothing is left to ask for."""
    left = max(node.free.memory_bytes, 0) // MIB
    if left and need.memory_bytes is None:
        return f"`memory: {left}MiB` could start on {node.name}: left out, it goes with the CPUs and GPUs"
    whose = f"`shoal nodes {node.name}` shows whose it is"
    return f"{whose}; a job that leaves `memory` out takes it with its CPUs and GPUs"


def _left(node: NodeUse) -> str:
    left = max(node.free.memory_bytes, 0)
    return size(left) if left else "none"
