"""What a release serves: a model by the name that somebody gives it, or a job's checkpoint as it is today."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from shoal.control.core import Core
from shoal.control.find import find_named
from shoal.control.services.replicas import spec_of_release
from shoal.engines.base import SavedCheckpoint, SavedState, SupportsCheckpoints
from shoal.errors import SpecError, StateError
from shoal.model.job import Job
from shoal.spec.service import ServiceSpec
from shoal.spec.service_clauses import ModelSpec
from shoal.store import Tx

USABLE = (SavedState.COMPLETE, SavedState.VERIFIED)


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    spec: ServiceSpec
    """With the very checkpoint it means: the same file means another one when the job has saved again."""
    model: str
    """For people: `NAME@STEP`, or as they called it."""


async def choose(core: Core, project: str, spec: ServiceSpec) -> Chosen:
    """`SpecError`, `StateError`: it names a job that is not there, or one that has not saved that."""
    asked = spec.model
    if not isinstance(asked, ModelSpec):
        return Chosen(spec=spec, model=asked or "")
    job = await core.store.read(lambda tx: _job(tx, asked.job, project))
    one = await _saved(core, job, asked)
    exact = asked.model_copy(update={"job": job.job_id, "step": one.step, "save": one.name})
    return Chosen(spec=spec.model_copy(update={"model": exact}), model=f"{job.name}@{one.step}")


def _job(tx: Tx, reference: str, project: str) -> Job:
    found = [named for named in find_named(tx, reference, (project,)) if named.array_id is None]
    if not found:
        raise SpecError(
            f"`model` names job `{reference}`; project `{project}` has no such job", hint="shoal queue --all"
        )
    return found[0].job


async def _saved(core: Core, job: Job, asked: ModelSpec) -> SavedCheckpoint:
    engine = core.engine
    items = (await engine.saved(job.job_id, 0.0)).items if isinstance(engine, SupportsCheckpoints) else ()
    for one in items:
        if one.state in USABLE and asked.step in (None, one.step) and asked.save in (None, one.name):
            return one
    which = "" if asked.step is None else f" of step {asked.step}"
    raise StateError(
        f"job {job.reference} `{job.name}` has no whole checkpoint{which} to serve",
        hint=f"see `shoal checkpoints {job.reference}`",
    )


def served_jobs(tx: Tx) -> Iterator[str]:
    """Whose checkpoints replicas may be given."""
    for service in tx.services.all():
        for release in tx.services.releases(service.service_id):
            model = spec_of_release(release.spec_json).model
            if isinstance(model, ModelSpec):
                yield model.job
