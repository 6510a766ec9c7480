"""Record and stop the elements of an array, some in each transaction: nobody else waits for all of them.

What was asked is recorded first, with the answer under the idempotency key; then it is done batch by batch.
The changes of others come between two batches. The caller is answered when all is done, also one who repeats
the key while it is not. After a crash `carry_on` does what is left.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import structlog

from shoal.control.actor import Actor
from shoal.control.core import Core
from shoal.control.frozen import spec_of
from shoal.control.once import fingerprint, once
from shoal.control.record import note
from shoal.control.stopping import ask_to_stop
from shoal.control.watch import cancel
from shoal.errors import NotFound, StoreUnavailable
from shoal.identity import open_secrets, seal_secrets
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import ArrayPlace, Job
from shoal.store import ArrayVerb, Tx

MAX_STOPPED = 50
"""Elements that one transaction stops: each takes ten statements, 0.25 ms of CPU together."""
MAX_MADE = 250
"""Elements that one transaction records: each takes three rows, 0.06 ms of CPU together."""
MAX_MADE_BYTES = 4 << 20
"""Of their specs: each element is recorded with the whole of it."""
SHOWN = 100
"""Elements that are told of by name. Of the others, how many they are."""
PATIENCE_S = 0.25
"""While the store is busy. More than a submission has: one that came while a batch was written goes before
the next, whatever thousands somebody else has asked for.
"""

log = structlog.get_logger()


class Chosen(msgspec.Struct, frozen=True):
    """The answer, as it is kept under a key."""

    count: int
    first: tuple[str, ...]
    """Jobs, at most `SHOWN`."""


class Stopped(msgspec.Struct, frozen=True):
    count: int
    """Elements that had not ended when it was asked for."""
    jobs: list[Job]
    """The first of them."""


async def stop_array(core: Core, actor: Actor, array_id: str, key: str | None) -> Stopped:
    """Ask for the end of every element that has not ended; when this returns, it is recorded of each."""
    await finish_submission(core, array_id)

    def change(tx: Tx) -> Chosen:
        now = core.clock.now()
        said = fingerprint("stop", f"array {array_id}")
        return once(tx, actor, key, said, now, Chosen, lambda: _ask(tx, actor, array_id, now))[0]

    asked = await core.store.write(change)
    await finish_stop(core, array_id)
    jobs = await core.store.read(lambda tx: [tx.jobs.get(job_id) for job_id in asked.first])
    return Stopped(asked.count, [job for job in jobs if job is not None])


def _ask(tx: Tx, actor: Actor, array_id: str, now: float) -> Chosen:
    first = tx.jobs.first_in_array(array_id)
    if first is None:
        raise NotFound(f"no array `{array_id}`", hint="shoal queue --all")
    asked = Chosen(
        count=tx.jobs.count_open_in_array(array_id),
        first=tuple(job_id for _, job_id in tx.jobs.open_in_array(array_id, 0, SHOWN)),
    )
    if asked.count:
        tx.array_work.begin(array_id, ArrayVerb.STOP, msgspec.json.encode(actor).decode())
        told = {"array_id": array_id, "count": asked.count}
        note(tx, "array.stop_asked", now, actor, project=first.project, data=told)
    return asked


async def finish_stop(core: Core, array_id: str) -> None:
    """Stop what is left to stop. May be done by several at once, and repeated."""
    is_over = False
    while not is_over:
        is_over, stopped = await core.store.write(
            lambda tx: _stop_some(core, tx, array_id), patience_s=PATIENCE_S
        )
        await cancel_all(core, stopped)


def _stop_some(core: Core, tx: Tx, array_id: str) -> tuple[bool, list[tuple[Job, Attempt]]]:
    under_way = tx.array_work.get(array_id, ArrayVerb.STOP)
    if under_way is None:
        return True, []
    actor = msgspec.json.decode(under_way.actor, type=Actor)
    found = tx.jobs.open_in_array(array_id, under_way.last_number, MAX_STOPPED)
    stopped = ask_to_stop(core, tx, actor, [job_id for _, job_id in found], core.clock.now(), is_noted=False)
    if len(found) < MAX_STOPPED:
        tx.array_work.end(array_id, ArrayVerb.STOP)
        return True, stopped
    tx.array_work.move(array_id, ArrayVerb.STOP, found[-1][0])
    return False, stopped


async def cancel_all(core: Core, stopped: Iterable[tuple[Job, Attempt]]) -> None:
    """Tell the engine of those that may still run something."""
    for job, attempt in stopped:
        if attempt.state is AttemptState.STOPPING:
            await cancel(core, job, attempt)


def num_at_once(first: Job) -> int:
    """How many elements like this one are recorded in one transaction."""
    return max(1, min(MAX_MADE, MAX_MADE_BYTES // len(first.spec_json)))


def begin_submission(
    core: Core, tx: Tx, actor: Actor, first: Job, secrets: dict[str, str], now: float
) -> list[Job]:
    """Record the first elements of an array whose numbers were admitted, and remember the others.

    `first`: the element with the lowest index, not recorded yet.
    """
    assert first.array is not None
    array_id = first.array.array_id
    jobs = [first, *_elements(core, first, 1, num_at_once(first) - 1)]
    add(core, tx, actor, jobs, secrets, now, has_spec=True)
    if len(jobs) < first.array.size:
        tx.array_work.begin(array_id, ArrayVerb.SUBMIT, msgspec.json.encode(actor).decode())
        if secrets:
            tx.secrets.put(array_id, seal_secrets(core.key, array_id, secrets, core.random))
    return jobs


async def finish_submission(core: Core, array_id: str) -> None:
    """Record the elements that are not yet. May be done by several at once, and repeated."""

    def is_whole(tx: Tx) -> bool:
        return tx.array_work.get(array_id, ArrayVerb.SUBMIT) is None

    is_over = await core.store.read(is_whole)
    while not is_over:
        is_over = await core.store.write(lambda tx: _make_some(core, tx, array_id), patience_s=PATIENCE_S)


def _make_some(core: Core, tx: Tx, array_id: str) -> bool:
    """Whether that was all."""
    under_way = tx.array_work.get(array_id, ArrayVerb.SUBMIT)
    if under_way is None:
        return True
    actor = msgspec.json.decode(under_way.actor, type=Actor)
    first = tx.jobs.first_in_array(array_id)
    assert first is not None
    sealed = tx.secrets.get(array_id)
    secrets = open_secrets(core.key, array_id, sealed) if sealed else {}
    done = tx.jobs.count_in_array(array_id)
    jobs = _elements(core, first, done, num_at_once(first))
    add(core, tx, actor, jobs, secrets, core.clock.now(), has_spec=False)
    assert first.array is not None
    if done + len(jobs) < first.array.size:
        return False
    tx.array_work.end(array_id, ArrayVerb.SUBMIT)
    tx.secrets.drop(array_id)
    return True


def _elements(core: Core, first: Job, start: int, count: int) -> list[Job]:
    """Elements as they are submitted, from the one at that place on."""
    spec = spec_of(first)
    assert spec.array is not None
    indices = spec.array.indices[start : start + count]
    return [_element(core, first, place, index) for place, index in enumerate(indices, start)]


def _element(core: Core, first: Job, place: int, index: int) -> Job:
    """Nothing of what has become of the first one since."""
    assert first.array is not None
    return Job(
        job_id=core.new_id("job"),
        project=first.project,
        number=first.number + place,
        name=first.name,
        owner=first.owner,
        owner_name=first.owner_name,
        queue=first.queue,
        priority=first.priority,
        request=first.request,
        retry=first.retry,
        spec_json=first.spec_json,
        after=first.after,
        array=ArrayPlace(
            array_id=first.array.array_id, index=index, size=first.array.size, at_once=first.array.at_once
        ),
        archive_digest=first.archive_digest,
        left_behind=first.left_behind,
        submitted_at=first.submitted_at,
        deadline_at=first.deadline_at,
    )


def add(
    core: Core,
    tx: Tx,
    actor: Actor,
    jobs: list[Job],
    secrets: dict[str, str],
    now: float,
    *,
    has_spec: bool,
) -> None:
    """Record jobs that were admitted, each with its first attempt. `has_spec`: the first event tells it."""
    made = [(job, core.recorder.new_attempt(job, job.submitted_at)) for job in jobs]
    tx.submissions.add(made)
    for number, (job, attempt) in enumerate(made):
        if secrets:
            tx.secrets.put(job.job_id, seal_secrets(core.key, job.job_id, secrets, core.random))
        data = _told(job, now)
        if has_spec and number == 0:
            # The other elements of an array have the same one.
            data["spec"] = job.spec_json
        note(tx, "job.submitted", now, actor, job=job, attempt=attempt, data=data)


def _told(job: Job, now: float) -> dict[str, object]:
    """With the spec, all that the scheduler is told of it: a decision can be made again from the log."""
    data: dict[str, object] = {"name": job.name, "number": job.number, "priority": job.priority}
    if job.array is not None:
        data["array_id"] = job.array.array_id
    if job.submitted_at != now:
        data["submitted_at"] = job.submitted_at  # with the first of its array, whenever this one was recorded
    if job.deadline_at is not None:
        data["deadline_at"] = job.deadline_at
    if job.after:
        data["after"] = [{"job_id": dep.job_id, "on": dep.on} for dep in job.after]
    return data


async def carry_on(core: Core) -> None:
    """One turn: finish what was asked of arrays and left half done."""
    for array_id, verb in await core.store.read(lambda tx: tx.array_work.all()):
        try:
            await (finish_submission if verb is ArrayVerb.SUBMIT else finish_stop)(core, array_id)
        except StoreUnavailable:
            raise
        except Exception:
            # One array that cannot be finished must not keep the others from it.
            log.exception("array.not_finished", array=array_id, verb=verb)
