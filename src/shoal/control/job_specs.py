"""Frozen specs and what follows from them, above all the task specs of an attempt. Pure: parsed once, read
many times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec

from shoal.engines.base import Engine, SupportsCheckpointDir
from shoal.model.attempt import Attempt, EndReason, NodeTask
from shoal.model.from_spec import log_rules_of, mounts_of, request_of, retry_of
from shoal.model.job import Job, ResourceRequest, RetryPolicy
from shoal.model.node import Node
from shoal.settings import Settings
from shoal.spec import JobSpec
from shoal.wire import (
    GpuHandle,
    LeftBehind,
    TaskFolders,
    TaskIdentity,
    TaskIsolation,
    TaskLease,
    TaskProgram,
    TaskRanks,
    TaskResources,
    TaskSpec,
)


class FrozenSpec(msgspec.Struct, frozen=True):
    """A spec as it will be recorded. Equal submissions may share one."""

    spec: JobSpec
    text: str
    """Its canonical JSON."""
    request: ResourceRequest
    retry: RetryPolicy


def freeze(spec: JobSpec | FrozenSpec) -> FrozenSpec:
    """Freeze the spec. A frozen spec is returned as it is."""
    if isinstance(spec, FrozenSpec):
        return spec
    return FrozenSpec(spec, spec.canonical_json(), request_of(spec), retry_of(spec))


def spec_of(job: Job) -> JobSpec:
    """Return the job's spec. It is frozen, so sharing one object is safe."""
    return _parsed(job.spec_json)


@lru_cache(maxsize=4096)
def _parsed(spec_json: str) -> JobSpec:
    return JobSpec.model_validate_json(spec_json)


def archive_path(settings: Settings, digest: str) -> str:
    """Return the path of a workdir snapshot. The digest was checked when it came in."""
    return str(settings.state_dir / "archives" / f"{digest}.tar")


def checkpoint_dir(job: Job, home: Path) -> str | None:
    """Return the directory for the job's checkpoints and its shared folder, or None if the job asks for
    neither.
    """
    spec = spec_of(job)
    has_directory = spec.checkpoint is not None or spec.shared
    return str(home / "checkpoints" / job.job_id) if has_directory else None


def checkpoint_dir_on(engine: Engine, job: Job, home: Path, attempts: Sequence[Attempt] = ()) -> str | None:
    """Return the directory as the nodes of this engine see it. Return None also if the last of `attempts`
    that was handed over ran on another engine, because no record says where that engine kept its directory.
    """
    native_id = next((attempt.native_id for attempt in reversed(attempts) if attempt.native_id), "")
    if ":" in native_id and not native_id.startswith(f"{engine.name}:"):
        return None
    directory = checkpoint_dir(job, home)
    if directory is None or not isinstance(engine, SupportsCheckpointDir):
        return directory
    return engine.checkpoint_dir(job.job_id)


def _model_dir(job: Job, home: Path) -> str | None:
    return str(home / "checkpoints" / job.replica.model) if job.replica and job.replica.model else None


def max_restarts(job: Job) -> int:
    """Return how many of the job's retries may be spent without a new attempt."""
    is_retried = job.retry.in_place and {EndReason.EXIT, EndReason.SIGNAL} <= job.retry.on
    return max(0, job.retry.max_retries - job.failures) if is_retried else 0


def _has_standby(job: Job, attempt: Attempt) -> bool:
    """Whether the attempt has standbys. A standby prepares a copy of the working folder, so a job whose nodes
    share one folder has none.
    """
    spec = spec_of(job)
    return spec.retry.standby and len(attempt.allocation) > 1 and max_restarts(job) > 0 and not spec.shared


def task_specs_for(
    job: Job,
    attempt: Attempt,
    nodes: Mapping[str, Node],
    *,
    uid: int,
    home: Path,
    mount_roots: tuple[Path, ...],
    control_urls: tuple[str, ...],
    renew_s: float,
    left_behind: LeftBehind | None = None,
    cache_max_bytes: int = 0,
) -> tuple[TaskSpec, ...]:
    """Return one task spec for each node of the allocation, in rank order. `home` is where checkpoints are
    kept.
    """
    spec = spec_of(job)
    program = _program(job, left_behind)
    folders = _folders(job, home, mount_roots, cache_max_bytes)
    lease = TaskLease(
        control_url=control_urls[0] if control_urls else None,
        control_urls=control_urls if len(control_urls) > 1 else (),
        renew_s=renew_s,
        fence_s=spec.fence,
    )
    isolation = TaskIsolation(uid=uid, has_open_network=spec.network == "open")
    return tuple(
        TaskSpec(
            identity=_identity(job, attempt, task.node),
            ranks=_ranks(job, attempt, node_rank),
            program=program,
            resources=_resources(job, task, nodes[task.node]),
            folders=folders,
            lease=lease,
            isolation=isolation,
        )
        for node_rank, task in enumerate(attempt.allocation)
    )


def _identity(job: Job, attempt: Attempt, node: str) -> TaskIdentity:
    return TaskIdentity(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        node=node,
        replacement=attempt.replacement_on(node),
        job_id=job.job_id,
        job_number=job.number,
        job_name=job.name,
        project=job.project,
        owner=job.owner_name,
        array_index=job.array.index if job.array else None,
        array_size=job.array.size if job.array else None,
    )


def _ranks(job: Job, attempt: Attempt, node_rank: int) -> TaskRanks:
    return TaskRanks(
        nodes=attempt.node_names,
        node_rank=node_rank,
        ranks_per_node=job.request.ranks_per_node,
        may_split_world=spec_of(job).world == "any",
        max_restarts=max_restarts(job),
        has_standby=_has_standby(job, attempt),
    )


def _program(job: Job, left_behind: LeftBehind | None) -> TaskProgram:
    spec = spec_of(job)
    return TaskProgram(
        run=spec.run,
        setup=spec.setup,
        env=dict(spec.env),
        archive_digest=job.archive_digest,
        left_behind=left_behind,
        log_rules=log_rules_of(spec),
        probe=job.replica.probe if job.replica else None,
    )


def _resources(job: Job, task: NodeTask, node: Node) -> TaskResources:
    spec = spec_of(job)
    return TaskResources(
        cpus=task.cpus,
        memory_bytes=task.memory_bytes,
        time_limit_s=spec.time_limit,
        grace_s=spec.grace,
        require=dict(job.request.require),
        gpu_ids=task.gpu_ids,
        gpus=_handles(task.gpu_ids, node),
        gpu_milli=task.gpu_milli,
        are_gpus_simulated=node.facts.is_simulated,
    )


def _folders(job: Job, home: Path, mount_roots: tuple[Path, ...], cache_max_bytes: int) -> TaskFolders:
    spec = spec_of(job)
    return TaskFolders(
        mounts=mounts_of(spec),
        mount_roots=tuple(map(str, mount_roots)) if spec.mounts else None,
        checkpoint_dir=checkpoint_dir(job, home),
        checkpoint_path=spec.checkpoint.path if spec.checkpoint is not None else None,
        checkpoint_interval_s=spec.checkpoint.interval if spec.checkpoint is not None else None,
        has_shared_folder=spec.shared,
        model_dir=_model_dir(job, home),
        cache_max_bytes=cache_max_bytes,
    )


def _handles(gpu_ids: tuple[int, ...], node: Node) -> tuple[GpuHandle, ...]:
    """Return each device with the names that its node reported. A device missing from the report has its
    index alone.
    """
    gpus = {gpu.index: gpu for gpu in node.facts.gpus}
    return tuple(
        GpuHandle(index=index, minor=gpus[index].minor, uuid=gpus[index].uuid)
        if index in gpus
        else GpuHandle(index=index)
        for index in gpu_ids
    )
