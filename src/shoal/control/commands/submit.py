"""Accept a job: check it, freeze it, and record it with its first attempt in one transaction."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from difflib import get_close_matches
from math import floor
from pathlib import Path

import msgspec

from shoal.control.actor import Actor
from shoal.control.capabilities import JobAdmission, Records, Sealing
from shoal.control.commands.arrays import (
    MAX_JOBS_SHOWN,
    ArrayReply,
    begin_submission,
    finish_submission,
    record_jobs,
)
from shoal.control.commands.job_records import ReferencedJob, elements_of, resolve_reference
from shoal.control.job_specs import FrozenSpec, freeze
from shoal.control.memory.planner_input import PlannerNodes, label
from shoal.control.project_tree import check_project_limits
from shoal.control.record import fingerprint, run_idempotent
from shoal.engines.base import Engine, SupportsCheckpointDir, SupportsPartitions
from shoal.errors import Denied, LimitReached, NotFound, ShoalError, SpecError, TooLarge
from shoal.model.job import ArrayElement, Dependency, DependencyKind, Job
from shoal.model.people import Project, User
from shoal.scheduler import Planner
from shoal.scheduler.explain.text import age
from shoal.scheduler.facts.policy import class_value
from shoal.settings import Settings
from shoal.spec import JobSpec
from shoal.spec.job_fields import TopologySpec
from shoal.spec.quantity import format_seconds, parse_moment
from shoal.store import ArrayVerb, Tx
from shoal.wire import LeftBehind

MAX_RECORDED_BYTES = 64 << 20
DAY_S = 86_400
MAX_RANKS_PER_CPU = 100
"""As many ranks as jobs of the smallest size, 0.01 CPU, fit on one CPU. A supervisor forks each rank, and
each costs the node a process, whatever the job may use: 4,096 ranks on 0.1 CPU drove a machine with two CPUs
to a load of 165.
"""
MAX_DEPENDENCIES = 11_000
"""Dependencies of one job: as many as the largest array has elements, plus as many as `after` has entries.
Each is recorded with the job, and read whenever the job is.
"""
PATIENCE_S = 0.2
"""While the store is busy, starts and ends go first: delaying them would gain a job nothing."""


class SubmitResult(msgspec.Struct, frozen=True, kw_only=True):
    jobs: tuple[Job, ...]
    """The first jobs, at most `arrays.MAX_JOBS_SHOWN`."""
    count: int = 1
    array_id: str | None = None
    was_repeated: bool = False


class SubmitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A submission as the API understood it."""

    spec: JobSpec | FrozenSpec
    project: str
    owner: User
    archive_digest: str | None = None
    left_behind: LeftBehind | None = None
    secrets: dict[str, str] = {}
    raw_request: bytes | None = None
    """The request as it came, normalised. A key is bound to this and not to its interpretation, because the
    version that gets it again may understand more or have other defaults.
    """
    refusal: ShoalError | None = None
    """What the caller found missing. A repeated key gets its first reply nevertheless."""


async def submit(
    admission: JobAdmission, actor: Actor, request: SubmitRequest, key: str | None
) -> SubmitResult:
    """Accept the job or raise with nothing changed. When this returns, the job is on disk.

    A repeated key gets the first reply even if the cluster or its rules have changed since.
    """
    submitted = freeze(request.spec)
    digest = _request_digest(admission.sealing, request, submitted)
    frozen = in_one_part(admission.planning.nodes, admission.engine, submitted)
    check_secrets(frozen.spec, request.secrets)
    refusal = request.refusal or _refusal(
        admission.planning.nodes, admission.engine, admission.settings, frozen
    )

    after = await _dependencies(admission.records, admission.sealing, frozen.spec, request.project)

    def change(tx: Tx) -> SubmitResult:
        now = admission.records.clock.now()
        accepted: list[Job] = []

        def accept() -> ArrayReply:
            if refusal is not None:
                raise refusal
            accepted.extend(
                _accept(
                    admission.records,
                    admission.planning.planner,
                    admission.sealing,
                    tx,
                    actor,
                    request,
                    frozen,
                    after,
                    now,
                )
            )
            count = accepted[0].array.size if accepted[0].array else 1
            return ArrayReply(count, (accepted[0].job_id,))

        reply, repeated = run_idempotent(tx, actor, key, digest, now, ArrayReply, accept)
        jobs = accepted[:1] or (job for job in map(tx.jobs.get, reply.job_ids) if job is not None)
        return _result(tuple(jobs), reply.count, was_repeated=repeated)

    result = await admission.records.store.write(change, patience_s=PATIENCE_S)
    if result.array_id is None:
        return result
    array_id = result.array_id
    await finish_submission(admission.records, admission.sealing, array_id)
    jobs = await admission.records.store.read(lambda tx: tx.jobs.in_array(array_id, MAX_JOBS_SHOWN))
    return msgspec.structs.replace(result, jobs=tuple(jobs))


def _result(jobs: tuple[Job, ...], count: int, *, was_repeated: bool) -> SubmitResult:
    array = jobs[0].array
    array_id = array.array_id if array else None
    return SubmitResult(jobs=jobs, count=count, array_id=array_id, was_repeated=was_repeated)


def _request_digest(sealing: Sealing, request: SubmitRequest, frozen: FrozenSpec) -> str:
    """Digest under our key, because the request holds secrets, and their plain hash in the database could be
    guessed at.
    """
    content = request.raw_request
    if content is None:  # from inside the control plane
        content = msgspec.json.encode((frozen.text, request.archive_digest, request.secrets), order="sorted")
    return fingerprint("submit", request.project, hmac.digest(sealing.key, content, "sha256").hex())


def in_one_part(planner_nodes: PlannerNodes, engine: Engine, frozen: FrozenSpec) -> FrozenSpec:
    """Keep a gang that requires no closeness itself in one part of a cluster that has several."""
    spec = frozen.spec
    topology = spec.topology or TopologySpec.model_construct(mode="preferred")
    is_close = topology.within is not None and topology.mode == "required"
    if frozen.request.max_nodes == 1 or is_close or not isinstance(engine, SupportsPartitions):
        return frozen
    level = engine.common_label(spec.resources.require, planner_nodes.pools)
    if level is None or level == topology.spread:
        return frozen
    return freeze(spec.model_copy(update={"topology": TopologySpec(within=level, spread=topology.spread)}))


def _refusal(
    planner_nodes: PlannerNodes, engine: Engine, settings: Settings, frozen: FrozenSpec
) -> ShoalError | None:
    """Return why this cluster, as it is now, does not take the job; None if it does."""
    try:
        check_queue(settings, frozen.spec)
        check_mounts(settings, frozen.spec)
        check_checkpoint(engine, frozen.spec)
        check_ranks(frozen)
        check_fit(planner_nodes, frozen)
    except ShoalError as error:
        return error
    return None


def check_secrets(spec: JobSpec, secrets: dict[str, str]) -> None:
    """Check that every named secret has a value, and that no other value came along."""
    named, sent = set(spec.secrets), set(secrets)
    if named - sent:
        missing = ", ".join(sorted(named - sent))
        raise SpecError(
            f"no value was sent for the secrets: {missing}",
            hint=f"export {min(named - sent)}=... before `shoal run`",
        )
    if sent - named:
        raise SpecError(f"secrets not named in the spec: {', '.join(sorted(sent - named))}")


def check_queue(settings: Settings, spec: JobSpec) -> None:
    """Allow only queues that the operator declared."""
    queues = settings.queues
    if spec.queue not in queues:
        near = get_close_matches(spec.queue, queues, n=1)
        meant = f"set `queue: {near[0]}`" if near else "leave `queue` out"
        raise SpecError(
            f"no queue `{spec.queue}`; this cluster has {', '.join(f'`{name}`' for name in queues)}",
            hint=f"{meant}, or let an operator declare it with `shoal up --queues {spec.queue}`",
            queues=list(queues),
        )


def check_mounts(settings: Settings, spec: JobSpec) -> None:
    """Allow only directories below the roots that the operator opened."""
    roots = settings.mount_roots
    for mount in spec.mounts:
        if not any(Path(mount.source).is_relative_to(root) for root in roots):
            allowed = ", ".join(map(str, roots)) or "nothing"
            raise Denied(
                f"mounting `{mount.source}` is not allowed here; allowed: {allowed}",
                hint="an operator can allow it with `shoal up --mount-roots DIR`",
            )


def check_checkpoint(engine: Engine, spec: JobSpec) -> None:
    """Refuse checkpoints if the next attempt, on another node, would not find them; and a folder for all
    nodes if the nodes share no disk.
    """
    if (spec.checkpoint is None and not spec.shared) or not isinstance(engine, SupportsCheckpointDir):
        return
    wish, field = "keeps checkpoints", "checkpoint"
    if spec.checkpoint is None:
        wish, field = "asks for one working folder on all nodes", "shared"
    if engine.checkpoint_dir("") is None:
        raise SpecError(
            f"{_job_text(spec)} {wish}, and this cluster has no directory that all nodes share",
            hint=f"leave out `{field}`, or let an operator type {engine.sharing_hint}",
        )


def check_ranks(frozen: FrozenSpec) -> None:
    """Refuse more ranks than their CPUs can carry."""
    request = frozen.request
    most = max(1, floor(request.cpus * MAX_RANKS_PER_CPU + 1e-9))  # 0.29 CPUs are 28.999...
    if request.ranks_per_node > most and not request.is_exclusive:
        needed = f"{request.ranks_per_node / MAX_RANKS_PER_CPU:g}"
        raise SpecError(
            f"{_job_text(frozen.spec)} starts {request.ranks_per_node} ranks on each node and asks for "
            f"{request.cpus:g} CPUs there; at most {MAX_RANKS_PER_CPU} ranks share a CPU",
            hint=f"set `cpus: {needed}` or more in `resources`, or `ranks_per_node: {most}` or less",
            ranks_per_node=request.ranks_per_node,
            limit=most,
        )


def check_fit(planner_nodes: PlannerNodes, frozen: FrozenSpec) -> None:
    """Refuse what no set of this cluster's nodes could ever hold. If no nodes are known, wait."""
    never = planner_nodes.never_fits(frozen.request)
    if never is not None:
        raise SpecError(f"{_job_text(frozen.spec)} {never.sentence}", hint=never.hint, **never.facts)


def _job_text(spec: JobSpec) -> str:
    return f"job `{spec.name}`" if spec.name else "the job"


def _accept(
    records: Records,
    planner: Planner,
    sealing: Sealing,
    tx: Tx,
    actor: Actor,
    request: SubmitRequest,
    frozen: FrozenSpec,
    after: tuple[Dependency, ...] | ShoalError,
    now: float,
) -> list[Job]:
    """Return the jobs that are recorded at once: of a large array, its first elements."""
    project = tx.people.get_project(request.project)
    if project is None:
        raise NotFound(f"no project `{request.project}`", hint="shoal project list")
    spec = frozen.spec
    priority = check_priority(planner, project, spec)
    check_project_limits(tx, project, frozen.request, _job_text(spec))
    deadline_at = check_deadline(spec, now)
    if isinstance(after, ShoalError):
        raise after
    count = len(spec.array.indices) if spec.array else 1
    check_size(frozen, after, count)
    admitted = tx.submissions.admit(project.name, count)
    check_quota(project, admitted.open_jobs - count, count)
    count_today(tx, project, count, now)
    place = None
    if spec.array is not None:
        index, at_once = spec.array.indices[0], spec.array.at_once
        place = ArrayElement(array_id=records.new_id("arr"), index=index, size=count, at_once=at_once)
    number, name = admitted.first, spec.name or f"job-{admitted.first}"
    job = _job(records.new_id("job"), request, frozen, number, name, priority, after, place, now, deadline_at)
    if request.left_behind:
        behind = tx.left_behind.put(project.name, request.left_behind, now)
        job = msgspec.structs.replace(job, left_behind=behind)
    if place is not None:
        return begin_submission(records, sealing, tx, actor, job, request.secrets, now)
    record_jobs(records.recorder, sealing, tx, actor, [job], request.secrets, now, has_spec=True)
    return [job]


def check_size(frozen: FrozenSpec, after: tuple[Dependency, ...], count: int) -> None:
    """Raise `TooLarge` if all elements of an array take too much together, because each is recorded whole."""
    size = len(frozen.text.encode()) + len(msgspec.json.encode(after))
    if size * count > MAX_RECORDED_BYTES:
        raise TooLarge(
            f"{count} jobs of {size} bytes each are {size * count} bytes; at most {MAX_RECORDED_BYTES} are "
            "taken in one submission",
            hint="put a long script in a file of the `workdir`, or submit a smaller array",
        )


def check_priority(planner: Planner, project: Project, spec: JobSpec) -> int:
    """Return the priority that the job asks for. Raise `Denied` if that is more than the project allows."""
    priority = _priority(planner, spec)
    if priority > project.max_priority:
        origin = f"`{spec.priority}` is priority {priority}, which" if priority != spec.priority else None
        raise Denied(
            f"{origin or f'priority {priority}'} is above {project.max_priority}, the highest in project "
            f"`{project.name}`",
            hint=f"set `priority: {project.max_priority}`, or ask an admin to raise it",
        )
    return priority


def _priority(planner: Planner, spec: JobSpec) -> int:
    """Return the priority of the class. The class is looked up only here, so a later change of the policy
    changes no open job.
    """
    if isinstance(spec.priority, int):
        return spec.priority
    classes = planner.policy.classes
    value = class_value(spec.priority, classes)
    if value is None:
        names = [priority_class.name for priority_class in classes]
        near = get_close_matches(spec.priority, names, n=1)
        raise SpecError(
            f"no priority class `{spec.priority}`; this cluster has {', '.join(f'`{n}`' for n in names)}",
            hint=f"set `priority: {near[0] if near else 0}`; a number from -1000 to 1000 is good too",
            classes=names,
        )
    return value


def check_deadline(spec: JobSpec, now: float) -> float | None:
    """Return the time of the deadline. Raise `SpecError` if the job could not have ended by then if it
    started now.
    """
    if spec.deadline is None:
        return None
    deadline_at = parse_moment(spec.deadline, now)
    left_s = round(deadline_at - now, 3)  # the sum was rounded: 2 h from now are 7199.9999998 s
    if left_s <= 0:
        raise SpecError(
            f"{_job_text(spec)} has the deadline `{spec.deadline}`, which has passed",
            hint="set a later `deadline`, such as `6h`; times are UTC",
        )
    if spec.time_limit is not None and spec.time_limit > left_s:
        may_run, grain_s = format_seconds(spec.time_limit), 60 if left_s >= 60 else 1
        longest = format_seconds(floor(left_s / grain_s) * grain_s)
        raise SpecError(
            f"{_job_text(spec)} may run {may_run} by its `time_limit`; "
            f"its `deadline` is {age(left_s)} from now",
            hint=f"set `time_limit: {longest}` or less, or a later `deadline`",
            deadline_at=deadline_at,
            time_limit_s=spec.time_limit,
        )
    return deadline_at


def count_today(tx: Tx, project: Project, more: int, now: float) -> None:
    """Count `more` jobs submitted today. Raise `LimitReached` if that exceeds the project's daily limit."""
    count = tx.daily_counts.add(f"project:{project.name}", more, now)
    if count > project.max_jobs_per_day:
        resets_s = DAY_S - now % DAY_S
        raise LimitReached(
            f"project `{project.name}` has submitted {count - more} jobs today (UTC); {more} more would pass "
            f"its limit of {project.max_jobs_per_day} a day, which begins again in {age(resets_s)}",
            hint="wait until then, or have an admin raise it: "
            f"`shoal project update {project.name} --max-jobs-per-day {2 * project.max_jobs_per_day}`",
            submitted_today=count - more,
            limit=project.max_jobs_per_day,
            resets_at=now + resets_s,
        )


def check_quota(project: Project, already: int, more: int) -> None:
    """Raise `LimitReached` if `more` open jobs are more than the project may have."""
    if already + more > project.max_open_jobs:
        raise LimitReached(
            f"project `{project.name}` has {already} open jobs; {more} more would pass its limit of "
            f"{project.max_open_jobs}",
            hint="wait for some to end, or stop some: `shoal queue`, `shoal stop JOB`",
            open_jobs=already,
            limit=project.max_open_jobs,
        )


async def _dependencies(
    records: Records, sealing: Sealing, spec: JobSpec, project: str
) -> tuple[Dependency, ...] | ShoalError:
    """Return the jobs named in `after`, or what is wrong with them.

    They are resolved before the transaction, which thousands of elements would make long. Jobs never go away,
    and an array gets no elements but those that are still to be recorded.
    """
    if not spec.after:
        return ()
    for array_id in await records.store.read(lambda tx: _unfinished_arrays(tx, spec, project)):
        await finish_submission(records, sealing, array_id)
    try:
        return await records.store.read(lambda tx: _resolve_dependencies(tx, spec, project))
    except ShoalError as error:
        return error


def _references(tx: Tx, spec: JobSpec, project: str) -> dict[str, list[ReferencedJob]]:
    """Return what each distinct reference in `after` stands for."""
    references = dict.fromkeys(after.job for after in spec.after)
    return {reference: resolve_reference(tx, reference, (project,)) for reference in references}


def _unfinished_arrays(tx: Tx, spec: JobSpec, project: str) -> list[str]:
    """Return arrays named in `after` that have elements still to be recorded."""
    references = [reference for named in _references(tx, spec, project).values() for reference in named]
    ids = sorted({reference.array_id for reference in references if reference.array_id is not None})
    return [reference for reference in ids if tx.array_work.get(reference, ArrayVerb.SUBMIT) is not None]


def _resolve_dependencies(tx: Tx, spec: JobSpec, project: str) -> tuple[Dependency, ...]:
    """Return the dependencies, each once. They must already exist, in the same project, so there can be no
    circle.
    """
    named = _references(tx, spec, project)
    wanted: dict[tuple[str, DependencyKind], ReferencedJob] = {}
    for after in spec.after:
        if not named[after.job]:
            raise SpecError(
                f"`after` names `{after.job}`; project `{project}` has no such job",
                hint="shoal queue --all",
            )
        on = DependencyKind(after.on)
        wanted |= {
            (reference.array_id or reference.job.job_id, on): reference for reference in named[after.job]
        }
    check_dependencies(spec, wanted.values())
    arrays = {reference.array_id for reference in wanted.values() if reference.array_id is not None}
    elements = {array_id: elements_of(tx, array_id) for array_id in arrays}
    dependencies: dict[tuple[str, DependencyKind], Dependency] = {}
    for (_, on), reference in wanted.items():
        for job in [reference.job] if reference.array_id is None else elements[reference.array_id]:
            dependencies[job.job_id, on] = Dependency(job_id=job.job_id, label=label(job), on=on)
    return tuple(dependencies.values())


def check_dependencies(spec: JobSpec, wanted: Iterable[ReferencedJob]) -> None:
    """Raise `SpecError` if the job would wait for more than `MAX_DEPENDENCIES` jobs. Reads no element."""
    count = sum(
        1 if reference.array_id is None or reference.job.array is None else reference.job.array.size
        for reference in wanted
    )
    if count > MAX_DEPENDENCIES:
        raise SpecError(
            f"{_job_text(spec)} would wait for {count:,} jobs; "
            f"`after` may stand for {MAX_DEPENDENCIES:,} at most",
            hint="let jobs in between wait for some arrays each, and name those in `after`",
        )


def _job(
    job_id: str,
    request: SubmitRequest,
    frozen: FrozenSpec,
    number: int,
    name: str,
    priority: int,
    after: tuple[Dependency, ...],
    array: ArrayElement | None,
    now: float,
    deadline_at: float | None,
) -> Job:
    spec = frozen.spec
    return Job(
        job_id=job_id,
        project=request.project,
        number=number,
        name=name,
        owner=request.owner.user_id,
        owner_name=request.owner.name,
        queue=spec.queue,
        priority=priority,
        request=frozen.request,
        retry=frozen.retry,
        spec_json=frozen.text,
        after=after,
        array=array,
        archive_digest=request.archive_digest,
        submitted_at=now,
        deadline_at=deadline_at,
    )
