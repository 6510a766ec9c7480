"""Checks that every engine makes: submissions that contradict themselves, and nodes or devices that are gone.

Pure functions. After these checks, every name is safe to use as a file name, and the task specs of a
gang agree.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping

from shoal.engines.base import Submission
from shoal.errors import EngineRefused, NodeGone
from shoal.model.node import NodeFacts
from shoal.wire import TaskSpec

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Ids and node names become names of directories: no separators and no leading dot."""
MAX_RANKS_PER_NODE = 4096
GANG_FIELDS = {
    "identity": ("epoch", "job_id", "owner", "array_index"),
    "ranks": ("nodes", "ranks_per_node"),
    "program": ("run", "archive_digest"),
    "folders": ("checkpoint_dir", "checkpoint_path", "model_dir"),
}
"""Fields that must be equal in every task spec of a gang."""


def is_name(text: str) -> bool:
    """Whether `text` may be used as the name of a directory."""
    return NAME.fullmatch(text) is not None


def refuse_malformed(submission: Submission, nodes: Mapping[str, NodeFacts]) -> None:
    """Raise `EngineRefused` with everything that is wrong with `submission` on any cluster.

    `NodeGone`: the submission is correct, but planned for other nodes than these.
    """
    problems = list(find_problems(submission))
    if problems:
        raise EngineRefused(
            f"attempt {submission.attempt_id!r} cannot be run: {'; '.join(problems)}",
            hint="shoal nodes",
            problems=problems,
        )
    for task_spec in submission.task_specs:
        gone = missing_resource(task_spec, nodes)
        if gone is not None:
            raise NodeGone(gone, hint="shoal nodes", node=task_spec.identity.node)


def refuse_foreign_projects(task_specs: Iterable[TaskSpec], engine: str, only_project: str | None) -> None:
    """Raise `EngineRefused` for task specs of another project than `only_project`.

    All jobs there run as one user, so each could take another's bootstrap token and, with it, its
    secrets. None: jobs of every project may run.
    """
    strangers = sorted({task_spec.identity.project for task_spec in task_specs} - {only_project})
    if only_project is not None and strangers:
        raise EngineRefused(
            f"this {engine.title()} is for project `{only_project}`, and the job is of `{strangers[0]}`: "
            "jobs there run as one user, and can read and stop each other's",
            hint="connect again with `--shared-trust` if all projects may",
        )


def missing_resource(task_spec: TaskSpec, nodes: Mapping[str, NodeFacts]) -> str | None:
    """Return, in words, what the plan used on the node that is not there now; None if nothing is missing."""
    node, gpu_ids = task_spec.identity.node, task_spec.resources.gpu_ids
    facts = nodes.get(node)
    if facts is None:
        return f"no such node as `{node}`; there are {', '.join(sorted(nodes)) or 'none'}"
    present = {gpu.index for gpu in facts.gpus}
    missing = [str(index) for index in gpu_ids if index not in present]
    return f"`{node}` has no GPU {', '.join(missing)}; it has {len(present)}" if missing else None


def find_problems(submission: Submission) -> Iterator[str]:
    """Yield every mistake, in words."""
    if not is_name(submission.attempt_id):
        yield f"the attempt id {submission.attempt_id!r} is not a plain name"
    if not submission.task_specs:
        yield "it has no task specs"
        return
    names = [task_spec.identity.node for task_spec in submission.task_specs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        yield f"more than one task spec for {', '.join(repeated)}"
    first = submission.task_specs[0]
    if list(first.ranks.nodes) != names:
        yield f"task specs for {', '.join(names)}, but the gang is {', '.join(first.ranks.nodes)}"
    for rank, task_spec in enumerate(submission.task_specs):
        for problem in _task_spec_problems(submission, task_spec, rank):
            yield f"{task_spec.identity.node}: {problem}"
        yield from (
            f"{task_spec.identity.node}: another `{f}` than {first.identity.node}"
            for f in _differences(first, task_spec)
        )


def _task_spec_problems(submission: Submission, task_spec: TaskSpec, rank: int) -> Iterator[str]:
    resources = task_spec.resources
    ranks = task_spec.ranks
    identity = task_spec.identity
    if identity.attempt_id != submission.attempt_id or identity.epoch != submission.epoch:
        yield f"the task spec is for attempt {identity.attempt_id} epoch {identity.epoch}"
    if ranks.node_rank != rank:
        yield f"node rank {ranks.node_rank} at place {rank}"
    if not 1 <= ranks.ranks_per_node <= MAX_RANKS_PER_NODE:
        yield f"{ranks.ranks_per_node} ranks per node; 1 to {MAX_RANKS_PER_NODE} are possible"
    if not (math.isfinite(resources.cpus) and resources.cpus > 0):
        yield f"a limit of {resources.cpus} CPUs"
    if "\0" in task_spec.program.run or any(
        "\0" in key + value or "=" in key for key, value in task_spec.program.env.items()
    ):
        yield "`run` or `env` holds a NUL, or a variable's name an equals sign"
    if not is_name(identity.node):
        yield f"the node's name {identity.node!r} is not a plain name"
    if len(set(resources.gpu_ids)) < len(resources.gpu_ids):
        yield f"a GPU twice in {resources.gpu_ids}"
    if resources.gpu_milli != 1000 and not (0 < resources.gpu_milli < 1000 and len(resources.gpu_ids) == 1):
        yield f"{resources.gpu_milli} thousandths of {len(resources.gpu_ids)} GPUs"


def _differences(first: TaskSpec, task_spec: TaskSpec) -> Iterator[str]:
    for part, fields in GANG_FIELDS.items():
        ours, theirs = getattr(task_spec, part), getattr(first, part)
        yield from (field for field in fields if getattr(ours, field) != getattr(theirs, field))
