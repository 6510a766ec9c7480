"""Record and stop the elements of an array in several transactions, so that no other caller waits for all of
them.

The request is recorded first, with the reply under the idempotency key. Then the elements follow batch by
batch, and changes of other callers come between two batches. The caller gets the reply when all is done, even
if it repeats the key earlier. After a crash `finish_arrays` does what is left.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import structlog

from shoal.control.actor import Actor
from shoal.control.capabilities import Records, Sealing
from shoal.control.commands.job_records import ask_to_stop
from shoal.control.job_specs import spec_of
from shoal.control.loops.watch import cancel
from shoal.control.record import AttemptRecorder, fingerprint, record_event, run_idempotent
from shoal.engines.base import Engine
from shoal.errors import NotFound, StoreUnavailable
from shoal.identity import open_secrets, seal_secrets
from shoal.ids import IdFactory
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import ArrayElement, Job
from shoal.store import ArrayVerb, Tx

MAX_STOPPED = 50
"""Elements that one transaction stops: each takes ten statements, together 0.25 ms of CPU."""
MAX_RECORDED = 250
"""Elements that one transaction records: each takes three rows, together 0.06 ms of CPU."""
MAX_RECORDED_BATCH_BYTES = 4 << 20
"""Size of their specs: each element is recorded with the whole spec."""
MAX_JOBS_SHOWN = 100
"""Elements that a reply names. The others are only counted."""
PATIENCE_S = 0.25
"""How long a batch lets other writes pass while the store is busy. Longer than for a submission: a submission
that came while a batch was written goes before the next batch, whatever thousands of elements another caller
asked for.
"""

log = structlog.get_logger()


class ArrayReply(msgspec.Struct, frozen=True):
    """The reply as it is kept under a key."""

    count: int
    job_ids: tuple[str, ...]
    """The first jobs, at most `MAX_JOBS_SHOWN`."""


class ArrayStop(msgspec.Struct, frozen=True):
    count: int
    """Elements that had not ended when the stop was asked for."""
    jobs: list[Job]
    """The first of them."""


async def stop_array(
    records: Records, engine: Engine, sealing: Sealing, actor: Actor, array_id: str, key: str | None
) -> ArrayStop:
    """Ask every element that has not ended to stop. When this returns, all these requests are recorded."""
    await finish_submission(records, sealing, array_id)

    def change(tx: Tx) -> ArrayReply:
        now = records.clock.now()
        digest = fingerprint("stop", f"array {array_id}")
        return run_idempotent(
            tx, actor, key, digest, now, ArrayReply, lambda: _record_stop_request(tx, actor, array_id, now)
        )[0]

    reply = await records.store.write(change)
    await finish_stop(records, engine, array_id)
    jobs = await records.store.read(lambda tx: [tx.jobs.get(job_id) for job_id in reply.job_ids])
    return ArrayStop(reply.count, [job for job in jobs if job is not None])


def _record_stop_request(tx: Tx, actor: Actor, array_id: str, now: float) -> ArrayReply:
    first = tx.jobs.first_in_array(array_id)
    if first is None:
        raise NotFound(f"no array `{array_id}`", hint="shoal queue --all")
    reply = ArrayReply(
        count=tx.jobs.count_open_in_array(array_id),
        job_ids=tuple(job_id for _, job_id in tx.jobs.open_in_array(array_id, 0, MAX_JOBS_SHOWN)),
    )
    if reply.count:
        tx.array_work.begin(array_id, ArrayVerb.STOP, msgspec.json.encode(actor).decode())
        facts = {"array_id": array_id, "count": reply.count}
        record_event(tx, "array.stop_asked", now, actor, project=first.project, data=facts)
    return reply


async def finish_stop(records: Records, engine: Engine, array_id: str) -> None:
    """Stop the remaining elements. May be repeated, and run by several callers at once."""
    is_over = False
    while not is_over:
        is_over, stopped = await records.store.write(
            lambda tx: _stop_batch(records, tx, array_id), patience_s=PATIENCE_S
        )
        await cancel_all(engine, stopped)


def _stop_batch(records: Records, tx: Tx, array_id: str) -> tuple[bool, list[tuple[Job, Attempt]]]:
    under_way = tx.array_work.get(array_id, ArrayVerb.STOP)
    if under_way is None:
        return True, []
    actor = msgspec.json.decode(under_way.actor, type=Actor)
    elements = tx.jobs.open_in_array(array_id, under_way.last_number, MAX_STOPPED)
    stopped = ask_to_stop(
        records.recorder, tx, actor, [job_id for _, job_id in elements], records.clock.now(), is_noted=False
    )
    if len(elements) < MAX_STOPPED:
        tx.array_work.end(array_id, ArrayVerb.STOP)
        return True, stopped
    tx.array_work.move(array_id, ArrayVerb.STOP, elements[-1][0])
    return False, stopped


async def cancel_all(engine: Engine, stopped: Iterable[tuple[Job, Attempt]]) -> None:
    """Tell the engine to stop the attempts that may still run something."""
    for job, attempt in stopped:
        if attempt.state is AttemptState.STOPPING:
            await cancel(engine, job, attempt)


def batch_size(first: Job) -> int:
    """Return how many elements like this one are recorded in one transaction."""
    return max(1, min(MAX_RECORDED, MAX_RECORDED_BATCH_BYTES // len(first.spec_json)))


def begin_submission(
    records: Records, sealing: Sealing, tx: Tx, actor: Actor, first: Job, secrets: dict[str, str], now: float
) -> list[Job]:
    """Record the first elements of an array whose numbers were admitted, and remember the others.

    `first`: the element with the lowest index, not recorded before.
    """
    assert first.array is not None
    array_id = first.array.array_id
    jobs = [first, *_elements(records.new_id, first, 1, batch_size(first) - 1)]
    record_jobs(records.recorder, sealing, tx, actor, jobs, secrets, now, has_spec=True)
    if len(jobs) < first.array.size:
        tx.array_work.begin(array_id, ArrayVerb.SUBMIT, msgspec.json.encode(actor).decode())
        if secrets:
            tx.secrets.put(array_id, seal_secrets(sealing.key, array_id, secrets, sealing.random))
    return jobs


async def finish_submission(records: Records, sealing: Sealing, array_id: str) -> None:
    """Record the remaining elements. May be repeated, and run by several callers at once."""

    def is_whole(tx: Tx) -> bool:
        return tx.array_work.get(array_id, ArrayVerb.SUBMIT) is None

    is_over = await records.store.read(is_whole)
    while not is_over:
        is_over = await records.store.write(
            lambda tx: _record_batch(records, sealing, tx, array_id), patience_s=PATIENCE_S
        )


def _record_batch(records: Records, sealing: Sealing, tx: Tx, array_id: str) -> bool:
    """Record one batch. Return whether it was the last."""
    under_way = tx.array_work.get(array_id, ArrayVerb.SUBMIT)
    if under_way is None:
        return True
    actor = msgspec.json.decode(under_way.actor, type=Actor)
    first = tx.jobs.first_in_array(array_id)
    assert first is not None
    sealed = tx.secrets.get(array_id)
    secrets = open_secrets(sealing.key, array_id, sealed) if sealed else {}
    done = tx.jobs.count_in_array(array_id)
    jobs = _elements(records.new_id, first, done, batch_size(first))
    record_jobs(records.recorder, sealing, tx, actor, jobs, secrets, records.clock.now(), has_spec=False)
    assert first.array is not None
    if done + len(jobs) < first.array.size:
        return False
    tx.array_work.end(array_id, ArrayVerb.SUBMIT)
    tx.secrets.drop(array_id)
    return True


def _elements(new_id: IdFactory, first: Job, start: int, count: int) -> list[Job]:
    """Return elements as they are submitted, from position `start` on."""
    spec = spec_of(first)
    assert spec.array is not None
    indices = spec.array.indices[start : start + count]
    return [_element(new_id, first, place, index) for place, index in enumerate(indices, start)]


def _element(new_id: IdFactory, first: Job, place: int, index: int) -> Job:
    """Return one element, without anything that has become of the first one since."""
    assert first.array is not None
    return Job(
        job_id=new_id("job"),
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
        array=ArrayElement(
            array_id=first.array.array_id, index=index, size=first.array.size, at_once=first.array.at_once
        ),
        archive_digest=first.archive_digest,
        left_behind=first.left_behind,
        submitted_at=first.submitted_at,
        deadline_at=first.deadline_at,
    )


def record_jobs(
    recorder: AttemptRecorder,
    sealing: Sealing,
    tx: Tx,
    actor: Actor,
    jobs: list[Job],
    secrets: dict[str, str],
    now: float,
    *,
    has_spec: bool,
) -> None:
    """Record jobs that were admitted, each with its first attempt. `has_spec`: the first event carries the
    spec.
    """
    submissions = [(job, recorder.new_attempt(job, job.submitted_at)) for job in jobs]
    tx.submissions.add(submissions)
    for number, (job, attempt) in enumerate(submissions):
        if secrets:
            tx.secrets.put(job.job_id, seal_secrets(sealing.key, job.job_id, secrets, sealing.random))
        data = _submitted_facts(job, now)
        if has_spec and number == 0:
            # The other elements of an array have the same spec.
            data["spec"] = job.spec_json
        record_event(tx, "job.submitted", now, actor, job=job, attempt=attempt, data=data)


def _submitted_facts(job: Job, now: float) -> dict[str, object]:
    """Return what the scheduler learns of the job besides its spec, so that a decision can be made again from
    the log.
    """
    data: dict[str, object] = {"name": job.name, "number": job.number, "priority": job.priority}
    if job.array is not None:
        data["array_id"] = job.array.array_id
    if job.submitted_at != now:
        # the time of the first element of its array, whenever this one was recorded
        data["submitted_at"] = job.submitted_at
    if job.deadline_at is not None:
        data["deadline_at"] = job.deadline_at
    if job.after:
        data["after"] = [{"job_id": dep.job_id, "on": dep.on} for dep in job.after]
    return data


async def finish_arrays(records: Records, engine: Engine, sealing: Sealing) -> None:
    """Run one turn: finish the array requests that were left half done."""
    for array_id, verb in await records.store.read(lambda tx: tx.array_work.all()):
        try:
            if verb is ArrayVerb.SUBMIT:
                await finish_submission(records, sealing, array_id)
            else:
                await finish_stop(records, engine, array_id)
        except StoreUnavailable:
            raise
        except Exception:
            # An array that cannot be finished must not keep the others from it.
            log.exception("array.not_finished", array=array_id, verb=verb)
