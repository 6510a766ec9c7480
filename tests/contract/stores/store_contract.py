"""What every store must do with jobs, attempts, nodes, people, keys and secrets."""

from __future__ import annotations

from functools import partial

import anyio
import pytest
from msgspec.structs import replace

from shoal.errors import Bug, StateError, StoreUnavailable
from shoal.model.attempt import Attempt, AttemptState, EndReason, NodeTask
from shoal.model.job import (
    ArrayElement,
    Dependency,
    GpuRequest,
    Job,
    JobOutcome,
    ResourceRequest,
    RetryPolicy,
)
from shoal.store import ArrayVerb, JobFilter, StaleRecord, Store, Tx
from shoal.wire import EndKind, RuleAction, TaskOutcome
from tests.contract.stores.store_records_contract import RecordsContract
from tests.support.store_records import a_job, add_job, an_attempt, end_job, move_attempt

HUGE = (1 << 63) - 1


class StoreContract(RecordsContract):
    """An implementation adds a `store` fixture and sets `__test__`."""

    __test__ = False

    # --- transactions -------------------------------------------------------------------------

    async def test_write_returns_what_the_change_returns_and_a_read_sees_it(self, store: Store) -> None:
        assert await store.write(lambda tx: add_job(tx, a_job())) == an_attempt(a_job())
        assert await store.read(lambda tx: tx.jobs.get("job_00000001")) == a_job()

    async def test_change_that_raises_leaves_nothing_behind(self, store: Store) -> None:
        def change(tx: Tx) -> None:
            add_job(tx, a_job())
            tx.events.append("job.submitted", at=1.0, actor="user:ana")
            raise StateError("not now")

        with pytest.raises(StateError, match="not now"):
            await store.write(change)
        assert await store.read(lambda tx: tx.jobs.get("job_00000001")) is None
        assert await store.read(lambda tx: tx.events.head().seq) == 0

    async def test_change_that_breaks_a_constraint_fails_alone(self, store: Store) -> None:
        await store.write(lambda tx: tx.jobs.add(a_job()))
        with pytest.raises(Bug, match="refused"):
            await store.write(lambda tx: tx.jobs.add(a_job()))
        assert await store.write(lambda tx: tx.jobs.next_number("vision", 5)) == 1

    async def test_concurrent_changes_each_get_their_own_answer(self, store: Store) -> None:
        answers: dict[int, object] = {}

        async def one(number: int) -> None:
            def change(tx: Tx) -> int:
                tx.meta.set(f"key-{number}", str(number))
                if number % 3 == 0:
                    raise StateError(f"no {number}")
                return number

            try:
                answers[number] = await store.write(change)
            except StateError as error:
                answers[number] = error.message

        async with anyio.create_task_group() as group:
            for number in range(40):
                group.start_soon(one, number)
        assert answers == {n: n if n % 3 else f"no {n}" for n in range(40)}
        kept = await store.read(lambda tx: [tx.meta.get(f"key-{n}") for n in range(40)])
        assert kept == [str(n) if n % 3 else None for n in range(40)]

    async def test_read_cannot_change_anything(self, store: Store) -> None:
        with pytest.raises((Bug, StoreUnavailable)):
            await store.read(lambda tx: tx.meta.set("a", "b"))
        assert await store.read(lambda tx: tx.meta.get("a")) is None
        await store.write(lambda tx: tx.meta.set("a", "c"))
        assert await store.read(lambda tx: tx.meta.get("a")) == "c"

    async def test_commit_callback_is_told_the_newest_event(self, store: Store) -> None:
        told: list[int] = []
        store.on_commit(told.append)
        await store.write(lambda tx: tx.events.append("a", at=1.0, actor="shoal"))
        await store.write(lambda tx: tx.events.append("b", at=2.0, actor="shoal"))
        assert told == [1, 2]

    async def test_closed_store_refuses_and_may_be_closed_again(self, store: Store) -> None:
        await store.close()
        await store.close()
        with pytest.raises(StoreUnavailable):
            await store.write(lambda tx: tx.meta.set("a", "b"))
        with pytest.raises(StoreUnavailable):
            await store.read(lambda tx: tx.meta.get("a"))

    # --- jobs ---------------------------------------------------------------------------------

    async def test_job_with_every_field_set_comes_back_equal(self, store: Store) -> None:
        job = a_job(
            7,
            name="züge \U0001f686 'quoted\" \\ %s ?",
            queue="night",
            priority=-5,
            request=ResourceRequest(
                min_nodes=2, max_nodes=4, gpus=GpuRequest(count=8, kind="H100"), cpus=0.1
            ),
            retry=RetryPolicy(max_retries=3, on=frozenset({"oom", "exit"}), backoff_s=0.25),
            after=(Dependency(job_id="job_x", label="vision/3"),),
            array=ArrayElement(array_id="arr_1", index=3, size=9, at_once=2),
            archive_digest="ab" * 32,
            submitted_at=1763180000.123456,
            excluded_nodes=("n1", "n2"),
            avoided_nodes=("n3",),
            outcome=JobOutcome.FAILED,
            because="exit 3",
            exit_code=3,
            ended_at=1763180001.5,
        )
        await store.write(lambda tx: add_job(tx, job))
        assert await store.read(lambda tx: tx.jobs.get(job.job_id)) == job

    async def test_job_is_found_by_number_and_the_newest_by_name(self, store: Store) -> None:
        def change(tx: Tx) -> None:
            # The clock went back between them: the number still tells which is newer.
            for job in (a_job(1, submitted_at=9000.0), a_job(2), a_job(3, name="other")):
                add_job(tx, job)
            add_job(tx, a_job(4, project="speech"))

        await store.write(change)
        assert await store.read(lambda tx: tx.jobs.by_number("vision", 2)) == a_job(2)
        assert await store.read(lambda tx: tx.jobs.by_number("speech", 2)) is None
        assert await store.read(lambda tx: tx.jobs.newest_named("vision", "train")) == a_job(2)
        assert await store.read(lambda tx: tx.jobs.newest_named("vision", "nothing")) is None

    async def test_numbers_are_given_in_blocks_per_project_and_never_twice(self, store: Store) -> None:
        def take(tx: Tx) -> list[int]:
            return [
                tx.jobs.next_number("vision"),
                tx.jobs.next_number("vision", 10),
                tx.jobs.next_number("vision"),
                tx.jobs.next_number("speech"),
            ]

        assert await store.write(take) == [1, 2, 12, 1]
        assert await store.write(take) == [13, 14, 24, 2]

    async def test_update_of_a_job_somebody_else_changed_is_stale(self, store: Store) -> None:
        await store.write(lambda tx: add_job(tx, a_job()))
        mine = replace(a_job(), because="mine", version=2)
        theirs = replace(a_job(), because="theirs", version=2)
        await store.write(lambda tx: tx.jobs.update(theirs))
        with pytest.raises(StaleRecord, match="vision/1"):
            await store.write(lambda tx: tx.jobs.update(mine))
        with pytest.raises(StaleRecord):
            await store.write(lambda tx: tx.jobs.update(a_job(99, version=2)))
        assert await store.read(lambda tx: tx.jobs.get(mine.job_id)) == theirs

    async def test_open_jobs_are_counted_through_end_and_retry(self, store: Store) -> None:
        def change(tx: Tx) -> list[int]:
            counts = [tx.jobs.count_open("vision")]
            attempts = [add_job(tx, a_job(n)) for n in (1, 2, 3)]
            tx.jobs.add(a_job(4, outcome=JobOutcome.CANCELLED))
            counts.append(tx.jobs.count_open("vision"))
            ended = end_job(tx, a_job(1), attempts[0])
            counts.append(tx.jobs.count_open("vision"))
            tx.jobs.update(replace(ended, because="edited", version=3))
            counts.append(tx.jobs.count_open("vision"))
            tx.jobs.update(replace(ended, outcome=None, epoch=2, version=4))
            counts.append(tx.jobs.count_open("vision"))
            return counts

        assert await store.write(change) == [0, 3, 2, 2, 3]
        assert await store.read(lambda tx: tx.jobs.count_open("speech")) == 0

    async def test_undone_change_does_not_count(self, store: Store) -> None:
        def change(tx: Tx) -> None:
            add_job(tx, a_job())
            raise StateError("over quota")

        with pytest.raises(StateError):
            await store.write(change)
        assert await store.read(lambda tx: tx.jobs.count_open("vision")) == 0

    async def test_outcomes_tell_open_ended_and_unknown_apart(self, store: Store) -> None:
        def change(tx: Tx) -> dict[str, JobOutcome | None]:
            add_job(tx, a_job(1))
            add_job(tx, a_job(2, outcome=JobOutcome.FAILED))
            many = [f"job_missing_{n}" for n in range(1200)]
            return tx.jobs.outcomes([a_job(1).job_id, *many, a_job(2).job_id])

        assert await store.write(change) == {"job_00000001": None, "job_00000002": JobOutcome.FAILED}
        assert await store.read(lambda tx: tx.jobs.outcomes([])) == {}

    async def test_references_name_jobs_as_people_do(self, store: Store) -> None:
        def change(tx: Tx) -> dict[str, str]:
            add_job(tx, a_job(1))
            add_job(tx, a_job(2))
            many = [f"job_missing_{n}" for n in range(1200)]
            return tx.jobs.references([a_job(1).job_id, *many, a_job(2).job_id, a_job(1).job_id])

        assert await store.write(change) == {"job_00000001": "vision/1", "job_00000002": "vision/2"}
        assert await store.read(lambda tx: tx.jobs.references([])) == {}

    async def test_open_elements_of_an_array_come_in_order(self, store: Store) -> None:
        def change(tx: Tx) -> tuple[list[tuple[int, str]], list[tuple[int, str]], int, int]:
            for n in (3, 1, 2):
                # Ids that sort the other way, as after a restart with a clock that was set back.
                place = ArrayElement(array_id="arr_1", index=n, size=3)
                add_job(tx, a_job(n, job_id=f"job_{9 - n}", submitted_at=1.0, array=place))
            add_job(tx, a_job(4, array=ArrayElement(array_id="arr_2", index=1, size=1)))
            add_job(tx, a_job(5))
            job = tx.jobs.get("job_7")
            assert job is not None
            end_job(tx, job, an_attempt(job))
            return (
                tx.jobs.open_in_array("arr_1", 0, 10),
                tx.jobs.open_in_array("arr_1", 1, 1),
                tx.jobs.count_open_in_array("arr_1"),
                tx.jobs.count_in_array("arr_1"),
            )

        first, third = (1, "job_8"), (3, "job_6")
        assert await store.write(change) == ([first, third], [third], 2, 3)
        found = await store.read(lambda tx: tx.jobs.first_in_array("arr_1"))
        assert found is not None
        assert found.job_id == "job_8"
        some = await store.read(lambda tx: tx.jobs.in_array("arr_1", 2))
        assert [job.number for job in some] == [1, 2]

    async def test_work_on_an_array_is_there_until_it_is_done(self, store: Store) -> None:
        def change(tx: Tx) -> list[object]:
            work = tx.array_work
            work.begin("arr_1", ArrayVerb.STOP, "ana")
            work.begin("arr_1", ArrayVerb.SUBMIT, "ben")
            work.move("arr_1", ArrayVerb.STOP, 7)
            found: list[object] = [work.get("arr_1", ArrayVerb.STOP), work.all()]
            work.begin("arr_1", ArrayVerb.STOP, "eve")
            work.end("arr_1", ArrayVerb.SUBMIT)
            return [*found, work.get("arr_1", ArrayVerb.STOP), work.get("arr_1", ArrayVerb.SUBMIT)]

        assert await store.write(change) == [
            ("ana", 7),
            [("arr_1", ArrayVerb.STOP), ("arr_1", ArrayVerb.SUBMIT)],
            ("eve", 0),
            None,
        ]

    async def test_counts_of_a_day_begin_again_the_next(self, store: Store) -> None:
        day = 86_400.0

        def change(tx: Tx) -> list[int]:
            counts = tx.daily_counts
            found = [counts.add("lab", 3, day), counts.add("lab", 4, 2 * day - 1), counts.get("lab", day)]
            found += [counts.get("lab", 2 * day), counts.add("lab", 5, 2 * day), counts.get("none", day)]
            counts.purge(3 * day)
            return [*found, counts.get("lab", 2 * day)]

        assert await store.write(change) == [3, 7, 7, 0, 5, 0, 0]

    async def test_number_beyond_64_bits_is_refused_and_the_largest_is_kept(self, store: Store) -> None:
        await store.write(lambda tx: tx.jobs.add(a_job(1, priority=HUGE)))
        with pytest.raises(Exception):  # noqa: B017 - each driver has its own word for it
            await store.write(lambda tx: tx.jobs.add(a_job(2, priority=HUGE + 1)))
        kept = await store.read(lambda tx: tx.jobs.get("job_00000001"))
        assert kept is not None
        assert kept.priority == HUGE

    # --- listing ------------------------------------------------------------------------------

    async def test_pages_follow_each_other_newest_first_without_gap_or_repeat(self, store: Store) -> None:
        def change(tx: Tx) -> None:
            for n in range(1, 26):
                # Five share each moment: the id decides among them.
                add_job(tx, a_job(n, submitted_at=float(n // 5), project=("vision", "speech")[n % 2]))

        await store.write(change)
        for wanted in (
            JobFilter(),
            JobFilter(projects=("vision", "speech", "none")),
            JobFilter(name="train"),
        ):
            seen = await _walk(store, wanted, limit=4)
            expected = sorted((a_job(n, submitted_at=float(n // 5)) for n in range(1, 26)), key=_place)
            assert [job.job_id for job in seen] == [job.job_id for job in reversed(expected)]

    async def test_filters_select_and_combine(self, store: Store) -> None:
        await store.write(_mixed_jobs)
        cases = [
            (JobFilter(), [6, 5, 4, 3, 2, 1]),
            (JobFilter(projects=("speech",)), [6, 5]),
            (JobFilter(projects=("vision", "speech"), statuses=("queued",)), [5, 2, 1]),
            (JobFilter(projects=()), []),
            (JobFilter(statuses=()), []),
            (JobFilter(statuses=("succeeded", "failed")), [4, 3]),
            (JobFilter(statuses=("running",)), [6]),
            (JobFilter(name="eval"), [6, 2]),
            (JobFilter(name="eval", projects=("vision",)), [2]),
            (JobFilter(owner="usr_bob"), [5]),
            (JobFilter(owner="usr_ana", statuses=("queued", "failed")), [4, 2, 1]),
            (JobFilter(owner="usr_ana", name="eval", statuses=("running",)), [6]),
            (JobFilter(array_id="arr_1"), [3]),
            (JobFilter(array_id="arr_1", name="eval"), []),
            (JobFilter(name="' OR 1=1 --"), []),
            (JobFilter(projects=tuple(f"p{n}" for n in range(100)), statuses=("queued", "failed")), []),
        ]
        for wanted, numbers in cases:
            page = await store.read(partial(_page, wanted=wanted))
            assert [job.number for job, _ in page] == numbers, wanted

    async def test_page_brings_each_job_with_its_newest_attempt(self, store: Store) -> None:
        def change(tx: Tx) -> list[tuple[Job, Attempt]]:
            job = a_job()
            move_attempt(tx, add_job(tx, job), AttemptState.ENDED, reason=EndReason.LOST)
            tx.jobs.update(replace(job, epoch=2, version=2))
            tx.attempts.add(an_attempt(job, 2))
            return tx.jobs.page(JobFilter(), None, 10)

        [(job, attempt)] = await store.write(change)
        assert (job.epoch, attempt.epoch, attempt.state) == (2, 2, AttemptState.QUEUED)

    async def test_status_follows_attempt_and_outcome_in_whichever_order_they_are_written(
        self, store: Store
    ) -> None:
        def retry(tx: Tx, job: Job, *, is_attempt_first: bool) -> Job:
            again = replace(job, outcome=None, epoch=job.epoch + 1, version=job.version + 1)
            if is_attempt_first:
                tx.attempts.add(an_attempt(job, again.epoch))
            tx.jobs.update(again)
            if not is_attempt_first:
                tx.attempts.add(an_attempt(job, again.epoch))
            return again

        def change(tx: Tx) -> list[str]:
            seen = []
            for number, is_attempt_first in ((1, True), (2, False)):
                job, attempt = a_job(number), add_job(tx, a_job(number))
                seen.append(_status(tx, number))
                attempt = move_attempt(tx, attempt, AttemptState.RUNNING)
                seen.append(_status(tx, number))
                job = end_job(tx, job, attempt, JobOutcome.FAILED)
                seen.append(_status(tx, number))
                job = retry(tx, job, is_attempt_first=is_attempt_first)
                seen.append(_status(tx, number))
                move_attempt(tx, an_attempt(job, 2), AttemptState.STARTING)
                # A late change of an attempt that is not the newest says nothing about the job.
                old = tx.attempts.of_job(job.job_id)[0]
                move_attempt(tx, old, AttemptState.ENDED, message="late")
                seen.append(_status(tx, number))
            return seen

        assert await store.write(change) == ["queued", "running", "failed", "queued", "starting"] * 2

    async def test_jobs_are_counted_by_status(self, store: Store) -> None:
        await store.write(_mixed_jobs)
        everywhere = await store.read(lambda tx: tx.jobs.count_by_status())
        assert everywhere == {"queued": 3, "succeeded": 1, "failed": 1, "running": 1}
        assert await store.read(lambda tx: tx.jobs.count_by_status(("speech",))) == {
            "queued": 1,
            "running": 1,
        }
        assert await store.read(lambda tx: tx.jobs.count_by_status(())) == {}

    # --- attempts -----------------------------------------------------------------------------

    async def test_attempt_with_every_field_set_comes_back_equal(self, store: Store) -> None:
        outcome = TaskOutcome(
            attempt_id="att",
            epoch=1,
            node="n1",
            kind=EndKind.SIGNALED,
            ended_at=5.5,
            signal=9,
            rank=3,
            rules_hit=(RuleAction.EXCLUDE_NODE,),
        )
        share = NodeTask(node="n1", cpus=2.5, memory_bytes=1 << 40, gpu_ids=(0, 7))
        attempt = an_attempt(
            a_job(),
            state=AttemptState.STOPPING,
            backoff_s=0.5,
            allocation=(share,),
            native_id="native-1",
            placed_at=2.0,
            started_nodes=("n1",),
            started_at=3.0,
            stop_reason=EndReason.PREEMPTED,
            stop_asked_at=4.0,
            outcomes=(outcome,),
            message="stopped\nby ana",
            version=7,
        )

        def change(tx: Tx) -> None:
            tx.jobs.add(a_job())
            tx.attempts.add(attempt)

        await store.write(change)
        assert await store.read(lambda tx: tx.attempts.get(attempt.attempt_id)) == attempt
        assert await store.read(lambda tx: tx.attempts.get("att_none")) is None

    async def test_attempts_of_a_job_come_oldest_first_and_one_an_epoch(self, store: Store) -> None:
        def change(tx: Tx) -> None:
            tx.jobs.add(a_job())
            for epoch in (2, 1, 3):
                tx.attempts.add(an_attempt(a_job(), epoch))

        await store.write(change)
        epochs = await store.read(lambda tx: [a.epoch for a in tx.attempts.of_job(a_job().job_id)])
        newest = await store.read(lambda tx: tx.attempts.newest(a_job().job_id))
        assert epochs == [1, 2, 3]
        assert newest == an_attempt(a_job(), 3)
        with pytest.raises(Bug):
            await store.write(lambda tx: tx.attempts.add(an_attempt(a_job(), 3, attempt_id="att_other")))

    async def test_update_of_an_attempt_somebody_else_changed_is_stale(self, store: Store) -> None:
        first = await store.write(lambda tx: add_job(tx, a_job()))
        await store.write(lambda tx: move_attempt(tx, first, AttemptState.STARTING))
        with pytest.raises(StaleRecord, match=first.attempt_id):
            await store.write(lambda tx: move_attempt(tx, first, AttemptState.ENDED))
        kept = await store.read(lambda tx: tx.attempts.get(first.attempt_id))
        assert kept is not None
        assert kept.state is AttemptState.STARTING

    async def test_submission_leaves_what_single_additions_leave(self, store: Store) -> None:
        def one_by_one(tx: Tx) -> None:
            tx.jobs.next_number("vision", 2)
            for number in (1, 2):
                add_job(tx, a_job(number))

        def at_once(tx: Tx) -> None:
            admitted = tx.submissions.admit("speech", 2)
            assert admitted == (1, 2)
            jobs = [a_job(number, job_id=f"job_s{number}", project="speech") for number in (1, 2)]
            tx.submissions.add([(job, an_attempt(job)) for job in jobs])

        def seen(tx: Tx, project: str) -> object:
            found = tx.jobs.page(JobFilter(projects=(project,), statuses=("queued",)))
            return (
                [(job.number, attempt.epoch) for job, attempt in found],
                [attempt.epoch for job, _ in found for attempt in tx.attempts.of_job(job.job_id)],
                sum(job.project == project for job, _ in tx.attempts.queued(10)),
                tx.jobs.count_open(project),
                tx.submissions.admit(project, 3),
            )

        await store.write(one_by_one)
        await store.write(at_once)
        one, other = await store.write(lambda tx: (seen(tx, "vision"), seen(tx, "speech")))
        assert one == other == ([(2, 1), (1, 1)], [1, 1], 2, 2, (3, 5))

    async def test_submission_that_is_refused_gives_back_its_numbers_and_its_count(
        self, store: Store
    ) -> None:
        def refused(tx: Tx) -> None:
            tx.submissions.admit("vision", 10)
            raise StateError("too many")

        await store.write(lambda tx: tx.submissions.admit("vision", 1))
        with pytest.raises(StateError):
            await store.write(refused)
        assert await store.write(lambda tx: tx.submissions.admit("vision", 1)) == (2, 2)

    async def test_changed_jobs_are_those_with_a_later_event_as_they_are_now(self, store: Store) -> None:
        def change(tx: Tx) -> int:
            for number in (1, 2, 3):
                add_job(tx, a_job(number))
                tx.events.append("job.submitted", at=1.0, actor="a", job_id=f"job_{number:08d}")
            seen = tx.events.head().seq
            again = an_attempt(a_job(2), epoch=2)
            tx.attempts.add(again)
            tx.events.append("node.added", at=1.0, actor="a", node="n1")
            for kind in ("job.retrying", "attempt.placed"):
                tx.events.append(kind, at=1.0, actor="a", job_id="job_00000002")
            return seen

        seen = await store.write(change)
        changed = await store.read(lambda tx: tx.jobs.changed_since(seen))
        assert [(job.number, attempt.epoch) for job, attempt in changed] == [(2, 2)]
        assert len(await store.read(lambda tx: tx.jobs.changed_since(0))) == 3

    async def test_queued_come_by_priority_then_age_then_id(self, store: Store) -> None:
        def change(tx: Tx) -> None:
            add_job(tx, a_job(1, priority=0, submitted_at=10.0))
            add_job(tx, a_job(2, priority=5, submitted_at=30.0))
            add_job(tx, a_job(4, priority=5, submitted_at=20.0))
            add_job(tx, a_job(3, priority=5, submitted_at=20.0))
            add_job(tx, a_job(5, priority=-1, submitted_at=1.0))
            move_attempt(tx, add_job(tx, a_job(6, priority=9)), AttemptState.STARTING)

        await store.write(change)
        queued = await store.read(lambda tx: tx.attempts.queued(10))
        assert [job.number for job, _ in queued] == [3, 4, 2, 1, 5]
        assert all(attempt.job_id == job.job_id for job, attempt in queued)
        assert [job.number for job, _ in await store.read(lambda tx: tx.attempts.queued(2))] == [3, 4]

    async def test_change_of_priority_changes_the_order(self, store: Store) -> None:
        def change(tx: Tx) -> list[int]:
            add_job(tx, a_job(1))
            add_job(tx, a_job(2))
            tx.jobs.update(a_job(2, priority=1, version=2))
            return [job.number for job, _ in tx.attempts.queued(10)]

        assert await store.write(change) == [2, 1]

    async def test_holding_names_exactly_the_attempts_that_hold_resources(self, store: Store) -> None:
        def change(tx: Tx) -> None:
            for n, state in enumerate(AttemptState, start=1):
                attempt = add_job(tx, a_job(n))
                if state is not AttemptState.QUEUED:
                    move_attempt(tx, attempt, state)

        await store.write(change)
        holding = await store.read(lambda tx: tx.attempts.holding())
        assert [(job.number, attempt.state.value) for job, attempt in holding] == [
            (2, "starting"),
            (3, "running"),
            (4, "stopping"),
        ]


def _mixed_jobs(tx: Tx) -> None:
    add_job(tx, a_job(1))
    add_job(tx, a_job(2, name="eval"))
    in_array = a_job(3, array=ArrayElement(array_id="arr_1", index=0, size=1))
    end_job(tx, in_array, add_job(tx, in_array))
    end_job(tx, a_job(4), add_job(tx, a_job(4)), JobOutcome.FAILED)
    add_job(tx, a_job(5, project="speech", owner="usr_bob"))
    move_attempt(tx, add_job(tx, a_job(6, project="speech", name="eval")), AttemptState.RUNNING)


def _status(tx: Tx, number: int) -> str:
    """As a listing by status sees it."""
    every = (*AttemptState, *JobOutcome)
    listed = {s: [job.number for job, _ in tx.jobs.page(JobFilter(statuses=(s,)), None, 10)] for s in every}
    [status] = [status for status, numbers in listed.items() if number in numbers]
    return str(status)


def _page(
    tx: Tx, wanted: JobFilter, before: tuple[float, str] | None = None, limit: int = 10
) -> list[tuple[Job, Attempt]]:
    return tx.jobs.page(wanted, before, limit)


def _place(job: Job) -> tuple[float, str]:
    return job.submitted_at, job.job_id


async def _walk(store: Store, wanted: JobFilter, limit: int) -> list[Job]:
    seen: list[Job] = []
    while True:
        before = _place(seen[-1]) if seen else None
        page = await store.read(partial(_page, wanted=wanted, before=before, limit=limit))
        seen.extend(job for job, _ in page)
        if len(page) < limit:
            return seen
