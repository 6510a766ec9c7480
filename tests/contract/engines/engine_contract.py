"""What every engine must keep, whatever runs below it. An engine's tests subclass `EngineContract` and
supply a `world` fixture: an engine, what programs look like on it, and the truth about what runs."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import NamedTuple

import msgspec
import pytest

from shoal.clock import SystemClock
from shoal.engines.base import OBSERVABLE, Engine, Observation, Submission
from shoal.errors import EngineRefused, EngineUnreachable, NodeGone
from shoal.ids import id_factory
from shoal.model.evidence import Evidence
from shoal.wire import EndKind
from tests.support.runtime.task_specs import change_task_spec, task_spec_of

DEADLINE_TURNS = 2000
new_id = id_factory(SystemClock().now)


class RankProgram(NamedTuple):
    """What every rank does: prints `lines`, then ends as told, or runs until it is stopped."""

    lines: tuple[str, ...] = ()
    exit_code: int | None = 0
    signal: int | None = None
    has_children: bool = False
    """Starts processes of its own, one of them in a session of its own, that outlive it if they can."""
    is_deaf: bool = False
    """Ignores SIGTERM."""
    is_missing: bool = False
    """There is no such executable."""


FOREVER = RankProgram(exit_code=None)


class EngineWorld(ABC):
    """One cluster under test, and what the suite must know about it besides the seven verbs."""

    engine: Engine
    node_names: tuple[str, ...]
    """At least two nodes."""

    @abstractmethod
    def run_line(self, program: RankProgram) -> str:
        """The `run` of a job that does what `program` says."""

    @abstractmethod
    async def pass_time(self) -> None:
        """Let the cluster get on with it for a moment."""

    @abstractmethod
    async def restart(self) -> None:
        """Replace `engine` by a new one over the same cluster, as after a crash of the control plane."""

    @abstractmethod
    def num_running(self, attempt_id: str) -> int:
        """The truth: processes of the attempt, its supervisors among them, that live now."""

    @abstractmethod
    def num_starts(self, attempt_id: str) -> int:
        """The truth: how often a task of the attempt was ever started."""

    def submission(
        self,
        program: RankProgram = FOREVER,
        *,
        num_nodes: int = 1,
        ranks_per_node: int = 1,
        attempt_id: str | None = None,
    ) -> Submission:
        attempt_id = attempt_id or new_id("att")
        nodes = self.node_names[:num_nodes]
        task_specs = tuple(
            task_spec_of(
                attempt_id=attempt_id,
                epoch=1,
                job_id="job_1",
                job_number=1,
                job_name="contract",
                project="tests",
                node=node,
                node_rank=rank,
                nodes=nodes,
                ranks_per_node=ranks_per_node,
                run=self.run_line(program),
                cpus=1.0,
                grace_s=5.0,
            )
            for rank, node in enumerate(nodes)
        )
        return Submission(attempt_id=attempt_id, epoch=1, task_specs=task_specs)

    async def observe(self, attempt_id: str) -> dict[str, Observation]:
        seen = await self.engine.list_owned()
        assert {o.evidence for o in seen} <= set(OBSERVABLE)
        return {o.node: o for o in seen if o.attempt_id == attempt_id}

    async def until(
        self, attempt_id: str, evidence: Evidence, *, is_started: bool = False
    ) -> list[Observation]:
        """Look until there is this evidence of every task; return the observations in the order of nodes."""
        seen: dict[str, Observation] = {}
        for _ in range(DEADLINE_TURNS):
            seen = await self.observe(attempt_id)
            if seen and all(
                o.evidence is evidence and (o.started_at is not None or not is_started) for o in seen.values()
            ):
                return [seen[name] for name in sorted(seen)]
            await self.pass_time()
        raise AssertionError(f"{attempt_id} never became {evidence}: {seen}")

    async def until_running(self, attempt_id: str) -> None:
        """A process is nobody's for an instant, while it becomes another program."""
        for _ in range(DEADLINE_TURNS):
            if self.num_running(attempt_id) > 0:
                return
            await self.pass_time()
        raise AssertionError(f"no process of {attempt_id} was ever seen")

    async def run_to_end(self, submission: Submission) -> list[Observation]:
        await self.engine.submit(submission)
        return await self.until(submission.attempt_id, Evidence.ENDED)

    async def run_until_started(self, submission: Submission) -> list[Observation]:
        await self.engine.submit(submission)
        return await self.until(submission.attempt_id, Evidence.ALIVE, is_started=True)

    async def end_all(self) -> None:
        """What a test has left."""
        left = {o.attempt_id for o in await self.engine.list_owned() if o.evidence is not Evidence.ENDED}
        for attempt_id in left:
            await self.engine.cancel(attempt_id, 0.0)
        for attempt_id in left:
            await self.until(attempt_id, Evidence.ENDED)

    async def whole_log(self, attempt_id: str, node: str, limit: int = 1 << 20) -> bytes:
        """Page through a log until it is complete."""
        data, offset = b"", 0
        for _ in range(DEADLINE_TURNS):
            chunk = await self.engine.read_log(attempt_id, node, offset, limit)
            assert chunk.next_offset >= offset
            data, offset = data + chunk.data, chunk.next_offset
            if chunk.is_complete:
                return data
        raise AssertionError(f"the log never became complete: {data[-200:]!r}")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def _texts(log: bytes, rank: int) -> list[bytes]:
    """What one rank printed."""
    fields = (line.split(b" ", 3) for line in log.splitlines())
    return [f[3] for f in fields if f[1] == str(rank).encode() and f[2] == b"o"]


def _with_replacement(submission: Submission, node: str, replacement: int) -> Submission:
    task_specs = tuple(
        change_task_spec(task_spec, replacement=replacement) if task_spec.identity.node == node else task_spec
        for task_spec in submission.task_specs
    )
    return msgspec.structs.replace(submission, task_specs=task_specs)


@pytest.mark.anyio
class EngineContract:
    """Subclass it, give it a `world` fixture, and leave it empty."""

    async def test_a_program_that_succeeds_is_seen_to_end_well(self, world: EngineWorld) -> None:
        submission = world.submission(RankProgram())
        [seen] = await world.run_to_end(submission)
        assert seen.outcome is not None
        assert seen.outcome.kind is EndKind.SUCCEEDED
        assert (seen.outcome.attempt_id, seen.outcome.epoch, seen.outcome.node) == (
            submission.attempt_id,
            1,
            seen.node,
        )
        assert seen.started_at is not None

    async def test_submitting_twice_is_one_job(self, world: EngineWorld) -> None:
        submission = world.submission(RankProgram(lines=("once",)))
        first = await world.engine.submit(submission)
        again = await world.engine.submit(submission)
        await world.until(submission.attempt_id, Evidence.ENDED)
        late = await world.engine.submit(submission)
        assert first == again == late
        assert len(await world.observe(submission.attempt_id)) == 1
        assert world.num_starts(submission.attempt_id) == 1
        assert _texts(await world.whole_log(submission.attempt_id, world.node_names[0]), 0) == [b"once"]

    async def test_submitting_what_was_forgotten_starts_nothing(self, world: EngineWorld) -> None:
        submission = world.submission(RankProgram())
        first = await world.engine.submit(submission)
        await world.until(submission.attempt_id, Evidence.ENDED)
        await world.engine.forget(submission.attempt_id)
        assert await world.engine.submit(submission) == first
        await world.pass_time()
        assert await world.observe(submission.attempt_id) == {}
        assert world.num_starts(submission.attempt_id) == 1

    @pytest.mark.parametrize("code", [1, 3, 255])
    async def test_exit_codes_survive(self, world: EngineWorld, code: int) -> None:
        [seen] = await world.run_to_end(world.submission(RankProgram(exit_code=code)))
        assert seen.outcome is not None
        assert (seen.outcome.kind, seen.outcome.exit_code) == (EndKind.EXITED, code)
        assert seen.outcome.rank == 0

    @pytest.mark.parametrize("signal", [9, 11])
    async def test_signals_survive(self, world: EngineWorld, signal: int) -> None:
        [seen] = await world.run_to_end(world.submission(RankProgram(exit_code=None, signal=signal)))
        assert seen.outcome is not None
        assert (seen.outcome.kind, seen.outcome.signal) == (EndKind.SIGNALED, signal)

    async def test_a_missing_executable_is_exit_127(self, world: EngineWorld) -> None:
        [seen] = await world.run_to_end(world.submission(RankProgram(is_missing=True, exit_code=127)))
        assert seen.outcome is not None
        assert (seen.outcome.kind, seen.outcome.exit_code) == (EndKind.EXITED, 127)

    async def test_cancelling_twice_is_fine_and_the_end_is_observed(self, world: EngineWorld) -> None:
        submission = world.submission()
        await world.run_until_started(submission)
        await world.engine.cancel(submission.attempt_id, 5.0)
        await world.engine.cancel(submission.attempt_id, 5.0)
        [seen] = await world.until(submission.attempt_id, Evidence.ENDED)
        assert seen.outcome is not None
        assert seen.outcome.kind is EndKind.STOPPED
        await world.engine.cancel(submission.attempt_id, 5.0)
        [after] = await world.until(submission.attempt_id, Evidence.ENDED)
        assert after.outcome == seen.outcome

    async def test_cancelling_at_once_ends_it(self, world: EngineWorld) -> None:
        submission = world.submission(num_nodes=2)
        await world.engine.submit(submission)
        await world.engine.cancel(submission.attempt_id, 5.0)
        for seen in await world.until(submission.attempt_id, Evidence.ENDED):
            assert seen.outcome is not None
            assert seen.outcome.kind is EndKind.STOPPED
        assert world.num_running(submission.attempt_id) == 0

    async def test_a_share_that_has_ended_is_begun_anew_for_a_greater_incarnation(
        self, world: EngineWorld
    ) -> None:
        if not world.engine.can_replace_tasks:
            pytest.skip("this engine starts all shares of an attempt or none")
        submission = world.submission(num_nodes=2)
        await world.run_until_started(submission)
        kept, lost = world.node_names[:2]
        anew = _with_replacement(submission, lost, 1)
        await world.engine.cancel(submission.attempt_id, 0.0)
        await world.until(submission.attempt_id, Evidence.ENDED)
        first = await world.engine.submit(anew)
        assert await world.engine.submit(anew) == first
        seen: dict[str, Observation] = {}
        for _ in range(DEADLINE_TURNS):
            seen = await world.observe(submission.attempt_id)
            if seen[lost].started_at is not None and seen[lost].evidence is Evidence.ALIVE:
                break
            await world.pass_time()
        assert (seen[lost].replacement, seen[lost].evidence) == (1, Evidence.ALIVE)
        assert (seen[kept].replacement, seen[kept].evidence) == (0, Evidence.ENDED)
        await world.until_running(submission.attempt_id)
        await world.engine.cancel(submission.attempt_id, 0.0)
        await world.until(submission.attempt_id, Evidence.ENDED)
        outcome = (await world.observe(submission.attempt_id))[lost].outcome
        assert outcome is not None
        assert outcome.replacement == 1

    async def test_a_share_that_lives_is_not_replaced(self, world: EngineWorld) -> None:
        if not world.engine.can_replace_tasks:
            pytest.skip("this engine starts all shares of an attempt or none")
        submission = world.submission(num_nodes=2)
        await world.run_until_started(submission)
        lost = world.node_names[1]
        with contextlib.suppress(EngineUnreachable):
            await world.engine.submit(_with_replacement(submission, lost, 1))
        await world.pass_time()
        seen = await world.observe(submission.attempt_id)
        assert (seen[lost].replacement, seen[lost].evidence) == (0, Evidence.ALIVE)
        assert world.num_starts(submission.attempt_id) == 2

    async def test_unknown_ids_are_not_an_error(self, world: EngineWorld) -> None:
        for unknown in ("att_nobody", "../../etc", "", "a/b"):
            await world.engine.cancel(unknown, 1.0)
            await world.engine.forget(unknown)
            chunk = await world.engine.read_log(unknown, world.node_names[0], 0, 100)
            assert (chunk.data, chunk.is_complete) == (b"", True)
        chunk = await world.engine.read_log("att_nobody", "../..", 0, 100)
        assert (chunk.data, chunk.is_complete) == (b"", True)
        assert await world.engine.list_owned() == []

    async def test_a_new_engine_adopts_what_runs(self, world: EngineWorld) -> None:
        submission = world.submission(num_nodes=2)
        before = await world.run_until_started(submission)
        await world.restart()
        after = await world.until(submission.attempt_id, Evidence.ALIVE, is_started=True)
        assert [msgspec.structs.replace(item, silent_s=0.0) for item in after] == [
            msgspec.structs.replace(item, silent_s=0.0) for item in before
        ]
        assert await world.engine.submit(submission) == before[0].native_id
        assert world.num_starts(submission.attempt_id) == 2
        await world.engine.cancel(submission.attempt_id, 5.0)
        await world.until(submission.attempt_id, Evidence.ENDED)
        assert world.num_running(submission.attempt_id) == 0

    async def test_an_outcome_while_the_engine_was_away_is_learned(self, world: EngineWorld) -> None:
        submission = world.submission(RankProgram(exit_code=7))
        await world.engine.submit(submission)
        await world.restart()
        [seen] = await world.until(submission.attempt_id, Evidence.ENDED)
        assert seen.outcome is not None
        assert seen.outcome.exit_code == 7
        await world.restart()
        [again] = await world.until(submission.attempt_id, Evidence.ENDED)
        assert again.outcome == seen.outcome

    async def test_logs_are_complete_after_the_end(self, world: EngineWorld) -> None:
        lines = tuple(f"line {i}" for i in range(50))
        submission = world.submission(RankProgram(lines=lines))
        await world.run_to_end(submission)
        log = await world.whole_log(submission.attempt_id, world.node_names[0])
        assert _texts(log, 0) == [line.encode() for line in lines]

    @pytest.mark.parametrize("limit", [1, 40, 200])
    async def test_logs_are_paged_by_offset_in_whole_lines(self, world: EngineWorld, limit: int) -> None:
        submission = world.submission(RankProgram(lines=tuple(f"line {i}" for i in range(20))))
        await world.run_to_end(submission)
        node = world.node_names[0]
        whole = await world.whole_log(submission.attempt_id, node)
        chunk = await world.engine.read_log(submission.attempt_id, node, 0, limit)
        assert chunk.data.endswith(b"\n")
        assert not chunk.is_complete
        assert await world.whole_log(submission.attempt_id, node, limit) == whole
        past = await world.engine.read_log(submission.attempt_id, node, len(whole), limit)
        assert (past.data, past.next_offset, past.is_complete) == (b"", len(whole), True)

    async def test_a_log_that_may_still_grow_is_not_complete(self, world: EngineWorld) -> None:
        submission = world.submission(RankProgram(lines=("first",), exit_code=None))
        await world.run_until_started(submission)
        node = world.node_names[0]
        for _ in range(DEADLINE_TURNS):
            chunk = await world.engine.read_log(submission.attempt_id, node, 0, 1 << 20)
            assert not chunk.is_complete
            if _texts(chunk.data, 0) == [b"first"]:
                break
            await world.pass_time()
        else:
            raise AssertionError("the first line never came")

    async def test_forgetting_keeps_logs_readable_and_may_be_repeated(self, world: EngineWorld) -> None:
        submission = world.submission(RankProgram(lines=("kept",)))
        await world.run_to_end(submission)
        node = world.node_names[0]
        before = await world.whole_log(submission.attempt_id, node)
        await world.engine.forget(submission.attempt_id)
        await world.engine.forget(submission.attempt_id)
        assert await world.engine.list_owned() == []
        assert await world.whole_log(submission.attempt_id, node) == before
        await world.restart()
        assert await world.engine.list_owned() == []
        assert await world.whole_log(submission.attempt_id, node) == before

    async def test_what_runs_cannot_be_forgotten(self, world: EngineWorld) -> None:
        submission = world.submission()
        await world.run_until_started(submission)
        await world.engine.forget(submission.attempt_id)
        assert [o.evidence for o in (await world.observe(submission.attempt_id)).values()] == [Evidence.ALIVE]

    async def test_refused_submissions_start_nothing(self, world: EngineWorld) -> None:
        good = world.submission(num_nodes=2)
        first, second = good.task_specs
        change = msgspec.structs.replace
        refused = {
            "no orders": change(good, task_specs=()),
            "unknown node": change(
                good,
                task_specs=tuple(
                    change_task_spec(o, node="nowhere", nodes=("nowhere",)) for o in good.task_specs[:1]
                ),
            ),
            "the same node twice": change(
                good,
                task_specs=(
                    first,
                    change_task_spec(
                        second, node=first.identity.node, nodes=(first.identity.node, first.identity.node)
                    ),
                ),
            ),
            "another attempt's order": change(
                good, task_specs=(first, change_task_spec(second, attempt_id="att_other"))
            ),
            "another epoch": change(good, epoch=2),
            "a rank missing": change(good, task_specs=(first,)),
            "ranks in disorder": change(
                good, task_specs=(change_task_spec(first, node_rank=1), change_task_spec(second, node_rank=0))
            ),
            "no ranks": change(
                good, task_specs=tuple(change_task_spec(o, ranks_per_node=0) for o in good.task_specs)
            ),
            "a GPU that is not there": change(
                good, task_specs=(change_task_spec(first, gpu_ids=(99,)), second)
            ),
            "a path for an id": change(
                good,
                attempt_id="../x",
                task_specs=tuple(change_task_spec(o, attempt_id="../x") for o in good.task_specs),
            ),
        }
        for item, submission in refused.items():
            with pytest.raises(EngineRefused):
                await world.engine.submit(submission)
            assert await world.engine.list_owned() == [], item
            assert world.num_starts(submission.attempt_id) == 0, item

    async def test_a_node_or_device_that_is_gone_is_named_and_nothing_is_started(
        self, world: EngineWorld
    ) -> None:
        good = world.submission(num_nodes=2)
        first, second = good.task_specs
        change = msgspec.structs.replace
        names = (first.identity.node, "nowhere")
        gone = {
            "nowhere": (
                change_task_spec(first, nodes=names),
                change_task_spec(second, node="nowhere", nodes=names),
            ),
            second.identity.node: (first, change_task_spec(second, gpu_ids=(99,))),
        }
        for node, task_specs in gone.items():
            with pytest.raises(NodeGone) as raised:
                await world.engine.submit(change(good, task_specs=task_specs))
            assert raised.value.facts["node"] == node
            assert await world.engine.list_owned() == []
            assert world.num_starts(good.attempt_id) == 0

    async def test_the_whole_process_tree_is_gone_after_a_cancel(self, world: EngineWorld) -> None:
        submission = world.submission(
            RankProgram(exit_code=None, has_children=True, is_deaf=True), ranks_per_node=2
        )
        await world.run_until_started(submission)
        await world.until_running(submission.attempt_id)
        await world.engine.cancel(submission.attempt_id, 0.2)
        await world.until(submission.attempt_id, Evidence.ENDED)
        assert world.num_running(submission.attempt_id) == 0

    async def test_the_whole_process_tree_is_gone_after_the_end(self, world: EngineWorld) -> None:
        submission = world.submission(RankProgram(has_children=True))
        await world.run_to_end(submission)
        assert world.num_running(submission.attempt_id) == 0

    async def test_two_nodes_have_consistent_ranks(self, world: EngineWorld) -> None:
        submission = world.submission(RankProgram(lines=("here",)), num_nodes=2, ranks_per_node=2)
        seen = await world.run_to_end(submission)
        assert [o.node for o in seen] == sorted(world.node_names[:2])
        assert len({o.native_id for o in seen}) == 1
        for node_rank, node in enumerate(world.node_names[:2]):
            log = await world.whole_log(submission.attempt_id, node)
            assert _texts(log, node_rank * 2) == [b"here"]
            assert _texts(log, (1 - node_rank) * 2) == []

    async def test_nodes_are_named_once_and_alive(self, world: EngineWorld) -> None:
        nodes = await world.engine.nodes()
        names = [facts.name for facts in nodes]
        assert len(names) == len(set(names))
        assert set(world.node_names) <= set(names)
        assert all(facts.is_alive and facts.cpus > 0 and facts.memory_bytes > 0 for facts in nodes)

    async def test_closing_leaves_what_runs_alone(self, world: EngineWorld) -> None:
        submission = world.submission()
        await world.run_until_started(submission)
        await world.engine.close()
        await world.restart()
        [seen] = await world.until(submission.attempt_id, Evidence.ALIVE)
        assert seen.started_at is not None
