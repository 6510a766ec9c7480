"""Refuse what this cluster or its data plane cannot do, before anyone relies on it.

Hosts: which service has which name in `Host`. A name belongs to one service of the whole cluster, from the
release that claims it for as long as the service may come back to that release.

Models: what a release serves is a model by the name that a person gives it, or a job's checkpoint as it is
today.
"""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterator, Sequence

import msgspec

from shoal.control.commands.job_records import resolve_reference
from shoal.control.services.replicas import spec_of_release
from shoal.engines.base import Engine, SavedCheckpoint, SavedState, SupportsCheckpoints
from shoal.errors import Denied, SpecError, StateError
from shoal.model.job import Job
from shoal.model.service import Service
from shoal.serving.table import is_shared_name
from shoal.settings import Settings
from shoal.spec.service import ServiceSpec
from shoal.spec.service_fields import ModelSpec
from shoal.store import Store, Tx

EMBEDDED_HINT = (
    "leave it out, or have the embedded data plane serve: `shoal down` and `shoal up --data-plane embedded`"
)
FIRST_USER_PORT = 1024
"""No job may bind a lower port."""


def check_data_plane(settings: Settings, spec: ServiceSpec) -> None:
    problems = _zero_problems(settings, spec.name, spec.replicas.min, spec.replicas.max)
    if settings.data_plane == "haproxy":
        if spec.balance == "tokens":
            problems.append(f"service `{spec.name}` asks for `balance: tokens`; HAProxy knows requests alone")
        if spec.scale.target == "tokens":
            problems.append(f"service `{spec.name}` scales by `tokens`, which HAProxy does not count")
        if spec.scale.sleep_after is not None:
            problems.append(
                f"service `{spec.name}` may sleep; HAProxy cannot hold requests until it is awake"
            )
        if spec.hedge_after is not None:
            problems.append(
                f"service `{spec.name}` asks for `hedge_after`; HAProxy asks one replica at a time"
            )
        if spec.port == "socket" or spec.network == "private":
            way = "port: socket" if spec.port == "socket" else "network: private"
            problems.append(
                f"service `{spec.name}` asks for `{way}`; HAProxy reaches ports of a machine alone"
            )
    _refuse_problems(problems)


def check_port(spec: ServiceSpec, reserved_ports: Collection[int | None]) -> None:
    """Refuse reserved ports. `reserved_ports`: ports of the control plane and the data plane, whose callers
    send tokens there.

    This is not a rule of the field itself, because releases that were recorded earlier must stay readable.
    """
    if spec.network == "private" or not isinstance(spec.port, int):
        return
    why = "Shoal's own" if spec.port in reserved_ports else "the machine's own: services have 1024 and above"
    if spec.port in reserved_ports or spec.port < FIRST_USER_PORT:
        raise SpecError(
            f"service `{spec.name}` asks for port {spec.port}, which is {why}",
            hint="leave `port` out and have the server listen at $PORT, or choose another port",
        )


def check_range(settings: Settings, name: str, low: int, high: int) -> None:
    """Check the bounds of replicas if nothing else changes."""
    _refuse_problems(_zero_problems(settings, name, low, high))


def _zero_problems(settings: Settings, name: str, low: int, high: int) -> list[str]:
    if settings.data_plane != "haproxy" or low > 0 or high == 0:
        return []
    return [
        f"service `{name}` asks for {low}..{high} replicas; HAProxy cannot hold requests until there is one"
    ]


def _refuse_problems(problems: list[str]) -> None:
    if problems:
        raise SpecError("; ".join(problems), problems=tuple(problems), hint=EMBEDDED_HINT)


def check_hosts(
    settings: Settings, tx: Tx, project: str, spec: ServiceSpec, existing: Service | None, *, may_claim: bool
) -> None:
    """Raise unless every host of the spec already belongs to this service, or is free and the caller may
    claim it.
    """
    held = set() if existing is None else _claimed_hosts(tx, existing)
    for host in spec.hosts:
        if _is_cluster_host(settings, host):
            raise SpecError(
                f"`hosts` has `{host}`, which is an address or a name of the cluster itself",
                hint="use a name of the service's own, such as `chat.example.org`",
            )
        owner = None if host in held else _owner(tx, host, existing)
        if owner is not None:
            raise StateError(
                f"host `{host}` belongs to service `{owner.name}` of project `{owner.project}`",
                hint=f"take another; it is free once two releases of `{owner.reference}` in a row do without "
                f"it, or after `shoal stop {owner.reference}`",
            )
        if host not in held and not may_claim:
            raise Denied(
                f"no service has host `{host}`; in project `{project}` only leads may claim one",
                hint="have a lead `shoal serve` this file once; from then on you may",
            )


def granted_hosts(
    settings: Settings, services: Sequence[tuple[Service, ServiceSpec]]
) -> dict[str, tuple[str, ...]]:
    """Return the hosts that lead to each service. If two services from before this check have one name, the
    older service gets it.
    """
    taken: set[str] = set()
    granted: dict[str, tuple[str, ...]] = {}
    for service, spec in sorted(services, key=lambda entry: (entry[0].created_at, entry[0].service_id)):
        hosts = tuple(
            host for host in spec.hosts if host not in taken and not _is_cluster_host(settings, host)
        )
        taken.update(hosts)
        granted[service.service_id] = hosts
    return granted


def _is_cluster_host(settings: Settings, host: str) -> bool:
    names = {settings.host, settings.serve_host, *settings.allowed_hosts, platform.node()}
    return is_shared_name(host) or host in {name.lower() for name in names}


def _owner(tx: Tx, host: str, existing: Service | None) -> Service | None:
    others = (
        service
        for service in tx.services.all()
        if existing is None or service.service_id != existing.service_id
    )
    return next((service for service in others if host in _claimed_hosts(tx, service)), None)


def _claimed_hosts(tx: Tx, service: Service) -> set[str]:
    """Return the hosts of all releases that may serve without a new `shoal serve`."""
    numbers = {service.live, service.newest}
    numbers |= {service.rollout.old, service.rollout.new} if service.rollout else set()
    releases = (tx.services.release(service.service_id, number) for number in numbers)
    return {
        host
        for release in releases
        if release is not None
        for host in spec_of_release(release.spec_json).hosts
    }


USABLE = (SavedState.COMPLETE, SavedState.VERIFIED)


class ModelChoice(msgspec.Struct, frozen=True, kw_only=True):
    spec: ServiceSpec
    """The spec with the exact checkpoint, because the same file means another one once the job has saved
    again.
    """
    model: str
    """For people: `NAME@STEP`, or as they called it."""


async def choose_model(store: Store, engine: Engine, project: str, spec: ServiceSpec) -> ModelChoice:
    """Find the model that the spec names. `SpecError`, `StateError`: there is no such job, or it has not
    saved that.
    """
    wanted = spec.model
    if not isinstance(wanted, ModelSpec):
        return ModelChoice(spec=spec, model=wanted or "")
    job = await store.read(lambda tx: _model_job(tx, wanted.job, project))
    checkpoint = await _saved_checkpoint(engine, job, wanted)
    exact = wanted.model_copy(update={"job": job.job_id, "step": checkpoint.step, "save": checkpoint.name})
    return ModelChoice(spec=spec.model_copy(update={"model": exact}), model=f"{job.name}@{checkpoint.step}")


def _model_job(tx: Tx, reference: str, project: str) -> Job:
    matches = [named for named in resolve_reference(tx, reference, (project,)) if named.array_id is None]
    if not matches:
        raise SpecError(
            f"`model` names job `{reference}`; project `{project}` has no such job", hint="shoal queue --all"
        )
    return matches[0].job


async def _saved_checkpoint(engine: Engine, job: Job, wanted: ModelSpec) -> SavedCheckpoint:
    items = (
        (await engine.inspect_checkpoints(job.job_id, 0.0)).items
        if isinstance(engine, SupportsCheckpoints)
        else ()
    )
    for checkpoint in items:
        if (
            checkpoint.state in USABLE
            and wanted.step in (None, checkpoint.step)
            and wanted.save in (None, checkpoint.name)
        ):
            return checkpoint
    which = "" if wanted.step is None else f" of step {wanted.step}"
    raise StateError(
        f"job {job.reference} `{job.name}` has no whole checkpoint{which} to serve",
        hint=f"see `shoal checkpoints {job.reference}`",
    )


def served_jobs(tx: Tx) -> Iterator[str]:
    """Yield the ids of jobs whose checkpoints replicas may get."""
    for service in tx.services.all():
        for release in tx.services.releases(service.service_id):
            model = spec_of_release(release.spec_json).model
            if isinstance(model, ModelSpec):
                yield model.job
