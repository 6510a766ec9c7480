"""What no engine takes: submissions that contradict themselves, or name nodes and devices that are gone.

Pure. Whatever passes here is safe to use as a file name and consistent between the nodes of a gang.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping

from shoal.engines.base import Submission
from shoal.errors import EngineRefused, NodeGone
from shoal.model.node import NodeFacts
from shoal.wire import Order

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Ids and node names become names of directories: no separators, no leading dot."""
MAX_RANKS_PER_NODE = 4096
SHARED = (
    "epoch",
    "job_id",
    "owner",
    "nodes",
    "ranks_per_node",
    "run",
    "archive_digest",
    "array_index",
    "checkpoint_dir",
    "checkpoint_path",
    "model_dir",
)
"""Fields that must be the same in every order of a gang."""


def is_name(text: str) -> bool:
    """Whether `text` may be used as the name of a directory."""
    return NAME.fullmatch(text) is not None


def refuse_malformed(submission: Submission, nodes: Mapping[str, NodeFacts]) -> None:
    """Raise `EngineRefused`, listing everything wrong with `submission`, whatever the cluster.

    `NodeGone`: nothing is, but it was planned for another cluster than these `nodes`.
    """
    problems = list(find_problems(submission))
    if problems:
        raise EngineRefused(
            f"attempt {submission.attempt_id!r} cannot be run: {'; '.join(problems)}",
            hint="shoal nodes",
            problems=problems,
        )
    for order in submission.orders:
        gone = what_is_gone(order, nodes)
        if gone is not None:
            raise NodeGone(gone, hint="shoal nodes", node=order.node)


def refuse_strangers(orders: Iterable[Order], engine: str, only_project: str | None) -> None:
    """Raise `EngineRefused` for orders of another project, where all jobs run as one user there: each could
    take another's ticket, and with it its secrets. None: everybody's may run.
    """
    strangers = sorted({order.project for order in orders} - {only_project})
    if only_project is not None and strangers:
        raise EngineRefused(
            f"this {engine.title()} is for project `{only_project}`, and the job is of `{strangers[0]}`: "
            "jobs there run as one user, and can read and stop each other's",
            hint="connect again with `--shared-trust` if all projects may",
        )


def what_is_gone(order: Order, nodes: Mapping[str, NodeFacts]) -> str | None:
    """What of the order's node was there when somebody planned for it and is not now, in words."""
    facts = nodes.get(order.node)
    if facts is None:
        return f"no such node as `{order.node}`; there are {', '.join(sorted(nodes)) or 'none'}"
    present = {gpu.index for gpu in facts.gpus}
    missing = [str(index) for index in order.gpu_ids if index not in present]
    return f"`{order.node}` has no GPU {', '.join(missing)}; it has {len(present)}" if missing else None


def find_problems(submission: Submission) -> Iterator[str]:
    """Every mistake, in words."""
    if not is_name(submission.attempt_id):
        yield f"the attempt id {submission.attempt_id!r} is not a plain name"
    if not submission.orders:
        yield "it has no orders"
        return
    names = [order.node for order in submission.orders]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        yield f"more than one order for {', '.join(repeated)}"
    first = submission.orders[0]
    if list(first.nodes) != names:
        yield f"orders for {', '.join(names)}, but the gang is {', '.join(first.nodes)}"
    for rank, order in enumerate(submission.orders):
        for problem in _order_problems(submission, order, rank):
            yield f"{order.node}: {problem}"
        yield from (f"{order.node}: another `{f}` than {first.node}" for f in _differences(first, order))


def _order_problems(submission: Submission, order: Order, rank: int) -> Iterator[str]:
    if order.attempt_id != submission.attempt_id or order.epoch != submission.epoch:
        yield f"the order is for attempt {order.attempt_id} epoch {order.epoch}"
    if order.node_rank != rank:
        yield f"node rank {order.node_rank} at place {rank}"
    if not 1 <= order.ranks_per_node <= MAX_RANKS_PER_NODE:
        yield f"{order.ranks_per_node} ranks per node; 1 to {MAX_RANKS_PER_NODE} are possible"
    if not (math.isfinite(order.limits.cpus) and order.limits.cpus > 0):
        yield f"a limit of {order.limits.cpus} CPUs"
    if "\0" in order.run or any("\0" in key + value or "=" in key for key, value in order.env.items()):
        yield "`run` or `env` holds a NUL, or a variable's name an equals sign"
    if not is_name(order.node):
        yield f"the node's name {order.node!r} is not a plain name"
    if len(set(order.gpu_ids)) < len(order.gpu_ids):
        yield f"a GPU twice in {order.gpu_ids}"
    if order.gpu_milli != 1000 and not (0 < order.gpu_milli < 1000 and len(order.gpu_ids) == 1):
        yield f"{order.gpu_milli} thousandths of {len(order.gpu_ids)} GPUs"


def _differences(first: Order, order: Order) -> Iterator[str]:
    return (field for field in SHARED if getattr(first, field) != getattr(order, field))
