"""What each supervisor of an attempt is told to do. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.control.frozen import spec_of
from shoal.engines.base import Engine, SupportsCheckpointDir
from shoal.model.attempt import Attempt, EndReason
from shoal.model.from_spec import log_rules_of, mounts_of
from shoal.model.job import Job
from shoal.model.node import Node
from shoal.wire import GpuHandle, LeftBehind, Limits, Order


def checkpoint_dir(job: Job, home: Path) -> str | None:
    """Where the job keeps its checkpoints, if it asked to keep any, and the folder that its nodes share."""
    spec = spec_of(job)
    has_directory = spec.checkpoint is not None or spec.shared
    return str(home / "checkpoints" / job.job_id) if has_directory else None


def checkpoint_dir_on(engine: Engine, job: Job, home: Path, attempts: Sequence[Attempt] = ()) -> str | None:
    """Where the nodes of that engine have it. None also where the last of its `attempts` that was handed over
    ran on another engine: where that kept its own, nobody has written down.
    """
    handed = next((one.native_id for one in reversed(attempts) if one.native_id), "")
    if ":" in handed and not handed.startswith(f"{engine.name}:"):
        return None
    kept = checkpoint_dir(job, home)
    if kept is None or not isinstance(engine, SupportsCheckpointDir):
        return kept
    return engine.checkpoint_dir(job.job_id)


def _model_dir(job: Job, home: Path) -> str | None:
    return str(home / "checkpoints" / job.replica.model) if job.replica and job.replica.model else None


def max_restarts(job: Job) -> int:
    """How many of the job's retries may be spent without a new attempt."""
    is_retried = job.retry.in_place and {EndReason.EXIT, EndReason.SIGNAL} <= job.retry.on
    return max(0, job.retry.max_retries - job.failures) if is_retried else 0


def _has_standby(job: Job, attempt: Attempt) -> bool:
    """One prepares a copy of the working folder, of which there is none where all nodes work in one."""
    spec = spec_of(job)
    return spec.retry.standby and len(attempt.allocation) > 1 and max_restarts(job) > 0 and not spec.shared


def orders_for(
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
) -> tuple[Order, ...]:
    """One order per node of the allocation, in rank order. `home`: where checkpoints are kept."""
    spec = spec_of(job)
    kept = checkpoint_dir(job, home)
    return tuple(
        Order(
            attempt_id=attempt.attempt_id,
            epoch=attempt.epoch,
            job_id=job.job_id,
            job_number=job.number,
            job_name=job.name,
            project=job.project,
            owner=job.owner_name,
            node=share.node,
            node_rank=node_rank,
            nodes=attempt.node_names,
            ranks_per_node=job.request.ranks_per_node,
            gpu_ids=share.gpu_ids,
            gpus=_handles(share.gpu_ids, nodes[share.node]),
            gpu_milli=share.gpu_milli,
            are_gpus_simulated=nodes[share.node].facts.is_simulated,
            run=spec.run,
            setup=spec.setup,
            env=dict(spec.env),
            mounts=mounts_of(spec),
            mount_roots=tuple(map(str, mount_roots)) if spec.mounts else None,
            archive_digest=job.archive_digest,
            left_behind=left_behind,
            cache_max_bytes=cache_max_bytes,
            has_shared_folder=spec.shared,
            limits=Limits(cpus=share.cpus, memory_bytes=share.memory_bytes),
            require=dict(job.request.require),
            log_rules=log_rules_of(spec),
            time_limit_s=spec.time_limit,
            incarnation=attempt.incarnation(share.node),
            max_restarts=max_restarts(job),
            has_standby=_has_standby(job, attempt),
            grace_s=spec.grace,
            fence_s=spec.fence,
            renew_s=renew_s,
            control_url=control_urls[0] if control_urls else None,
            control_urls=control_urls if len(control_urls) > 1 else (),
            array_index=job.array.index if job.array else None,
            array_size=job.array.size if job.array else None,
            checkpoint_dir=kept,
            checkpoint_path=spec.checkpoint.path if spec.checkpoint is not None else None,
            checkpoint_interval_s=spec.checkpoint.interval if spec.checkpoint is not None else None,
            model_dir=_model_dir(job, home),
            has_open_network=spec.network == "open",
            may_split_world=spec.world == "any",
            probe=job.replica.probe if job.replica else None,
            uid=uid,
        )
        for node_rank, share in enumerate(attempt.allocation)
    )


def _handles(gpu_ids: tuple[int, ...], node: Node) -> tuple[GpuHandle, ...]:
    """Each device by the names its node reported; one that is gone from the report has its index alone."""
    known = {gpu.index: gpu for gpu in node.facts.gpus}
    return tuple(
        GpuHandle(index=index, minor=known[index].minor, uuid=known[index].uuid)
        if index in known
        else GpuHandle(index=index)
        for index in gpu_ids
    )
