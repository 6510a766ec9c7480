"""Accept a job: check it, freeze it, and record it with its first attempt in one transaction."""

from __future__ import annotations

import hmac
from pathlib import Path

import msgspec

from shoal.control.actor import Actor
from shoal.control.core import Core
from shoal.control.find import jobs_named
from shoal.control.once import fingerprint, once
from shoal.control.record import note
from shoal.control.snapshot import label
from shoal.errors import Denied, LimitReached, NotFound, ShoalError, SpecError, TooLarge
from shoal.identity import seal_secrets
from shoal.model.from_spec import request_of, retry_of
from shoal.model.job import ArrayPlace, Dependency, DependencyKind, Job
from shoal.model.people import Project, User
from shoal.scheduler import impossible
from shoal.spec import JobSpec
from shoal.store import Tx

MAX_RECORDED_BYTES = 64 << 20


class SubmitResult(msgspec.Struct, frozen=True, kw_only=True):
    jobs: tuple[Job, ...]
    array_id: str | None = None
    was_repeated: bool = False


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A submission as the API understood it."""

    spec: JobSpec
    project: str
    owner: User
    archive_digest: str | None = None
    secrets: dict[str, str] = {}


async def submit(core: Core, actor: Actor, asked: Asked, key: str | None) -> SubmitResult:
    """Accept the job or raise with nothing changed. When this returns, the job is on disk.

    A repeated key gets the first answer even where the cluster or its rules have changed since.
    """
    check_secrets(asked)
    refusal = _refusal(core, asked.spec)
    said = _said(core, asked)

    def accept(tx: Tx, now: float) -> list[str]:
        if refusal is not None:
            raise refusal
        return _accept(core, tx, actor, asked, now)

    def change(tx: Tx) -> SubmitResult:
        now = core.clock.now()
        ids, repeated = once(tx, actor, key, said, now, list[str], lambda: accept(tx, now))
        jobs = tuple(job for job in map(tx.jobs.get, ids) if job is not None)
        array = jobs[0].array
        return SubmitResult(jobs=jobs, array_id=array.array_id if array else None, was_repeated=repeated)

    return await core.store.write(change)


def _said(core: Core, asked: Asked) -> str:
    """Secrets count under our key: their plain hash in the database could be guessed at."""
    secrets = hmac.digest(core.key, msgspec.json.encode(asked.secrets, order="sorted"), "sha256").hex()
    return fingerprint("submit", asked.spec.canonical_json(), asked.project, asked.archive_digest, secrets)


def _refusal(core: Core, spec: JobSpec) -> ShoalError | None:
    """Why this cluster, as it is now, does not take the job; None if it does."""
    try:
        check_mounts(core, spec)
        check_fit(core, spec)
    except ShoalError as error:
        return error
    return None


def check_secrets(asked: Asked) -> None:
    """Every named secret has a value, and no other value came along."""
    named, given = set(asked.spec.secrets), set(asked.secrets)
    if named - given:
        missing = ", ".join(sorted(named - given))
        raise SpecError(
            f"no value was sent for the secrets: {missing}",
            hint=f"export {min(named - given)}=... before `shoal run`",
        )
    if given - named:
        raise SpecError(f"secrets not named in the spec: {', '.join(sorted(given - named))}")


def check_mounts(core: Core, spec: JobSpec) -> None:
    """Only directories below the roots that the operator opened."""
    roots = core.settings.mount_roots
    for mount in spec.mounts:
        if not any(Path(mount.source).is_relative_to(root) for root in roots):
            allowed = ", ".join(map(str, roots)) or "nothing"
            raise Denied(
                f"mounting `{mount.source}` is not allowed here; allowed: {allowed}",
                hint="an operator can allow it with `shoal up --mount-roots DIR`",
            )


def check_fit(core: Core, spec: JobSpec) -> None:
    """Refuse what no set of this cluster's nodes could ever hold; with no nodes known yet, wait."""
    if not core.node_views:
        return
    never = impossible(request_of(spec), core.node_views)
    if never is not None:
        who = f"job `{spec.name}`" if spec.name else "the job"
        raise SpecError(f"{who} {never.sentence}", hint=never.hint, **never.facts)


def _accept(core: Core, tx: Tx, actor: Actor, asked: Asked, now: float) -> list[str]:
    project = tx.people.get_project(asked.project)
    if project is None:
        raise NotFound(f"no project `{asked.project}`", hint="shoal project list")
    spec = asked.spec
    indices = spec.array.indices if spec.array else (None,)
    check_quota(tx, project, len(indices))
    after = _dependencies(tx, asked)
    check_size(asked.spec, after, len(indices))
    first = tx.jobs.next_number(project.name, len(indices))
    array_id = core.new_id("arr") if spec.array else None
    # Equals are started in the order of their ids, which is random within a millisecond.
    ids = sorted(core.new_id("job") for _ in indices)
    for offset, (job_id, index) in enumerate(zip(ids, indices, strict=True)):
        place = None
        if array_id is not None and index is not None and spec.array is not None:
            place = ArrayPlace(array_id=array_id, index=index, size=len(indices), at_once=spec.array.at_once)
        job = _job(job_id, asked, first + offset, after, place, now)
        tx.jobs.add(job)
        attempt = core.recorder.next_attempt(tx, job, now)
        if asked.secrets:
            tx.secrets.put(job.job_id, seal_secrets(core.key, job.job_id, asked.secrets, core.random))
        data: dict[str, object] = {"name": job.name, "number": job.number}
        if offset == 0:
            # The other elements of an array have the same one.
            data["spec"] = job.spec_json
        note(tx, "job.submitted", now, actor, job=job, attempt=attempt, data=data)
    return ids


def check_size(spec: JobSpec, after: tuple[Dependency, ...], count: int) -> None:
    """Every element of an array is recorded whole: raise `TooLarge` where all of them take too much."""
    size = len(spec.canonical_json().encode()) + len(msgspec.json.encode(after))
    if size * count > MAX_RECORDED_BYTES:
        raise TooLarge(
            f"{count} jobs of {size} bytes each are {size * count} bytes; at most {MAX_RECORDED_BYTES} are "
            "taken in one submission",
            hint="put a long script in a file of the `workdir`, or submit a smaller array",
        )


def check_quota(tx: Tx, project: Project, more: int) -> None:
    """Raise `LimitReached` where `more` open jobs are more than the project may have."""
    already = tx.jobs.count_open(project.name)
    if already + more > project.max_open_jobs:
        raise LimitReached(
            f"project `{project.name}` has {already} open jobs; {more} more would pass its limit of "
            f"{project.max_open_jobs}",
            hint="wait for some to end, or stop some: `shoal queue`, `shoal stop JOB`",
            open_jobs=already,
            limit=project.max_open_jobs,
        )


def _dependencies(tx: Tx, asked: Asked) -> tuple[Dependency, ...]:
    """Jobs named in `after` must exist already, in the same project: so there can be no circle."""
    found = []
    for after in asked.spec.after:
        jobs = jobs_named(tx, after.job, asked.project)
        if not jobs:
            raise SpecError(
                f"`after` names `{after.job}`; project `{asked.project}` has no such job",
                hint="shoal queue --all",
            )
        on = DependencyKind(after.on)
        found += [Dependency(job_id=job.job_id, label=label(job), on=on) for job in jobs]
    return tuple(found)


def _job(
    job_id: str,
    asked: Asked,
    number: int,
    after: tuple[Dependency, ...],
    array: ArrayPlace | None,
    now: float,
) -> Job:
    spec = asked.spec
    return Job(
        job_id=job_id,
        project=asked.project,
        number=number,
        name=spec.name or f"job-{number}",
        owner=asked.owner.user_id,
        owner_name=asked.owner.name,
        queue=spec.queue,
        priority=spec.priority,
        request=request_of(spec),
        retry=retry_of(spec),
        spec_json=spec.canonical_json(),
        after=after,
        array=array,
        archive_digest=asked.archive_digest,
        submitted_at=now,
    )
