"""Model objects as views. Pure; callers have decided before what the requester may see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from shoal.api.views import schema
from shoal.control.job_specs import spec_of
from shoal.control.loops.project_usage import ProjectShare
from shoal.control.memory.health import EngineOutage
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import Job, ReplicaRef, ResourceRequest, TopologyRequest
from shoal.model.node import Node, Window
from shoal.model.people import DeviceAmounts, Membership, Project, Role, Token, User
from shoal.scheduler import Explanation, Outlook
from shoal.store import Event
from shoal.wire import World


def status_of(job: Job, attempt: Attempt | None) -> str:
    """The status that people see: the attempt's state while the job is open, else how it ended."""
    if job.outcome is not None:
        return job.outcome.value
    return attempt.state.value if attempt is not None else "queued"


def render_job(job: Job, attempt: Attempt | None) -> schema.JobView:
    """`attempt` is the job's newest."""
    array = job.array
    return {
        "job_id": job.job_id,
        "ref": job.reference,
        "project": job.project,
        "number": job.number,
        "name": job.name,
        "owner": job.owner_name,
        "queue": job.queue,
        "priority": job.priority,
        "status": status_of(job, attempt),
        "epoch": job.epoch,
        "nodes": list(attempt.node_names) if attempt is not None else [],
        "array": {"id": array.array_id, "index": array.index, "size": array.size} if array else None,
        "replica": _replica_place(job.replica) if job.replica else None,
        "submitted_at": job.submitted_at,
        "deadline_at": job.deadline_at,
        "started_at": attempt.started_at if attempt is not None else None,
        "ended_at": job.ended_at,
        "exit_code": job.exit_code,
        "because": job.because,
        "failures": job.failures,
        "losses": job.losses,
        "request": render_request(job.request),
    }


def _replica_place(place: ReplicaRef) -> schema.ReplicaRefView:
    return {
        "service_id": place.service_id,
        "service": place.service,
        "release": place.release,
        "slot": place.slot,
    }


def render_request(request: ResourceRequest) -> schema.RequestView:
    gpus, topology = request.gpus, request.topology
    return {
        "nodes": request.min_nodes,
        "min_nodes": request.min_nodes,
        "max_nodes": request.max_nodes,
        "cpus": request.cpus,
        "memory_bytes": request.memory_bytes,
        "disk_bytes": request.disk_bytes,
        "gpus": {"count": gpus.count, "kind": gpus.kind, "share": gpus.milli / 1000} if gpus else None,
        "ranks_per_node": request.ranks_per_node,
        "is_exclusive": request.is_exclusive,
        "exclude": list(request.exclude),
        "require": dict(request.require),
        "topology": render_topology(topology) if topology else None,
        "time_limit_s": request.time_limit_s,
    }


def render_topology(topology: TopologyRequest) -> schema.TopologyView:
    return {"within": topology.within, "is_required": topology.is_required, "spread": topology.spread}


def render_attempt(attempt: Attempt, world: World | None) -> schema.AttemptView:
    return {
        "attempt_id": attempt.attempt_id,
        "epoch": attempt.epoch,
        "state": attempt.state.value,
        "nodes": list(attempt.node_names),
        "queued_at": attempt.queued_at,
        "placed_at": attempt.placed_at,
        "started_at": attempt.started_at,
        "ended_at": attempt.ended_at,
        "reason": attempt.reason.value if attempt.reason else None,
        "exit_code": attempt.exit_code,
        "message": attempt.message,
        "rendezvous_round": attempt.rendezvous_round,
        "failure": attempt.failure.message if attempt.failure else None,
        "written": render_written(attempt),
        "world": _render_world(world) if world is not None else None,
    }


def render_written(attempt: Attempt) -> schema.WrittenView | None:
    """The files that are removed with an attempt that has ended."""
    written = attempt.written
    if written is None or attempt.state is not AttemptState.ENDED:
        return None
    return {
        "num_files": written.num_files,
        "num_bytes": written.num_bytes,
        "names": list(written.names),
        "is_more": written.is_truncated,
        "folder": written.folder,
    }


def checkpoint_of(job: Job) -> str | None:
    """Where its ranks find what is kept: a path, or `$SHOAL_CHECKPOINT_DIR`. None: nothing is kept."""
    kept = spec_of(job).checkpoint
    return None if kept is None else kept.path or "$SHOAL_CHECKPOINT_DIR"


def _render_world(world: World) -> schema.WorldView:
    return {"size": world.size, "ranks": world.ranks, "is_whole": world.is_whole}


def render_explanation(explanation: Explanation) -> schema.ExplanationView:
    return {
        "why": explanation.why.value,
        "sentence": explanation.sentence,
        "details": list(explanation.details),
        "hint": explanation.hint,
        "facts": explanation.facts,
    }


def render_outlook(outlook: Outlook) -> schema.OutlookView:
    return {
        "basis": outlook.basis.value,
        "earliest": outlook.earliest,
        "likely": outlook.likely,
        "latest": outlook.latest,
        "coverage": outlook.coverage,
        "num_starts": outlook.num_starts,
        "promised_at": outlook.promised_at,
        "is_firm": outlook.is_firm,
        "sentence": outlook.sentence,
        "changes": [
            {"setting": change.setting, "sentence": change.sentence, "starts_at": change.starts_at}
            for change in outlook.changes
        ],
        "not_looked": outlook.not_looked,
    }


def render_detail(
    job: Job,
    attempts: list[Attempt],
    explanation: Explanation | None,
    world_of: Callable[[Attempt], World | None],
) -> schema.JobDetailView:
    newest = max(attempts, key=lambda attempt: attempt.epoch, default=None)
    return {
        **render_job(job, newest),
        "attempts": [render_attempt(attempt, world_of(attempt)) for attempt in attempts],
        "explanation": render_explanation(explanation) if explanation else None,
        "spec": msgspec.json.decode(job.spec_json),
        "archive": job.archive_digest,
    }


def render_window(window: Window, there: Iterable[Job], visible: tuple[str, ...] | None) -> schema.WindowView:
    """`there`: jobs that may still run on its nodes when it begins."""
    is_told = window.project is None or visible is None or window.project in visible
    return {
        "id": window.window_id,
        "kind": window.kind.value,
        "nodes": list(window.nodes),
        "from_at": window.from_at,
        "until_at": window.until_at,
        "project": window.project if is_told else None,
        "because": window.because if is_told else "",
        "by": window.by,
        "created_at": window.created_at,
        "still_there": [job.reference for job in there if visible is None or job.project in visible],
    }


def render_node(
    node: Node,
    holding: Iterable[tuple[Job, Attempt]],
    visible: tuple[str, ...] | None,
    outage: EngineOutage | None = None,
    silent: Iterable[Job] = (),
) -> schema.NodeView:
    """`holding`: the jobs that hold resources on this node. Jobs that the caller may not see are counted, not
    named. `silent`: the jobs without a report from this node.
    """
    facts = node.facts
    held = list(holding)

    def named(jobs: Iterable[Job]) -> list[str]:
        return sorted(job.reference for job in jobs if visible is None or job.project in visible)

    tasks = [task for _, attempt in held for task in attempt.allocation if task.node == node.name]
    return {
        "name": facts.name,
        "pool": facts.pool,
        "state": node.state.value,
        "because": node.because,
        "by": node.by,
        "changed_at": node.changed_at,
        "cpus": facts.cpus,
        "memory_bytes": facts.memory_bytes,
        "disk_bytes": facts.disk_bytes,
        "gpus": [{"index": gpu.index, "kind": gpu.kind} for gpu in facts.gpus],
        "gpus_used": sum(task.num_gpus for task in tasks),
        "cpus_used": sum(task.cpus for task in tasks),
        "memory_used_bytes": sum(task.memory_bytes for task in tasks),
        "is_simulated": facts.is_simulated,
        "is_alive": facts.is_alive,
        "closed": facts.closed,
        "is_gone": node.is_gone,
        "is_busy": facts.is_busy,
        "takes_work": node.takes_work,
        "confinement": facts.confinement,
        "remarks": list(node.remarks),
        "labels": dict(facts.labels),
        "engine": node.engine,
        "jobs": named(job for job, _ in held),
        "silent_jobs": named(silent),
        "unanswered": render_outage(outage) if outage else None,
    }


def render_outage(outage: EngineOutage) -> schema.UnansweredView:
    return {"since": outage.since, "has_answered": outage.has_answered}


def render_event(event: Event, refs: Mapping[str, str]) -> schema.EventView:
    """`refs`: the names of jobs for people, by id."""
    return {
        "seq": event.seq,
        "at": event.at,
        "kind": event.kind,
        "actor": event.actor,
        "project": event.project,
        "job_id": event.job_id,
        "ref": refs.get(event.job_id) if event.job_id else None,
        "attempt_id": event.attempt_id,
        "node": event.node,
        "data": event.data,
        "request_id": event.request_id,
        "hash": event.hash,
    }


def render_user(user: User) -> schema.UserView:
    return {
        "user_id": user.user_id,
        "name": user.name,
        "is_active": user.is_active,
        "cluster_role": user.cluster_role.value if user.cluster_role else None,
        "created_at": user.created_at,
    }


def render_project(
    project: Project, role: Role | None, open_jobs: int, share: ProjectShare
) -> schema.ProjectView:
    return {
        "name": project.name,
        "parent": project.parent,
        "role": role.value if role else None,
        "quota": _amounts(project.quota),
        "borrow": _amounts(project.borrow),
        "limit": _amounts(project.limit),
        "weight": project.weight,
        "held": {"gpus": share.held.milligpus / 1000, "cpus": share.held.millicpus / 1000},
        "standing": share.relative_usage,
        "max_open_jobs": project.max_open_jobs,
        "max_jobs_per_day": project.max_jobs_per_day,
        "max_priority": project.max_priority,
        "max_upload_bytes": project.max_upload_bytes,
        "open_jobs": open_jobs,
        "created_at": project.created_at,
    }


def _amounts(devices: DeviceAmounts | None) -> schema.AmountsView | None:
    return None if devices is None else {"gpus": devices.gpus, "cpus": devices.cpus}


def render_member(membership: Membership) -> schema.MemberView:
    return {"user": membership.user_name, "project": membership.project, "role": membership.role.value}


def render_token(token: Token, user: str) -> schema.TokenView:
    """`user`: the name of the token's user."""
    return {
        "id": token.token_id,
        "user_id": token.user_id,
        "user": user,
        "parent": token.parent,
        "label": token.label,
        "scope": token.scope.value,
        "project": token.project,
        "service": token.service,
        "created_at": token.created_at,
        "expires_at": token.expires_at,
        "revoked_at": token.revoked_at,
    }
