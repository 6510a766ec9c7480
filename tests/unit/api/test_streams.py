"""Streams: every line once, over retries and reconnections, until the job has ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.api import log_follower
from shoal.api.log_pages import ALL, JobLogPage, LogPosition
from shoal.control.memory.health import LATE_S
from shoal.engines.fake import Act, by_run
from shoal.model.attempt import Attempt, AttemptState
from shoal.settings import ServerLimits
from shoal.wire import EndKind
from tests.support.planes.asgi import AsgiStream
from tests.support.planes.bench import ControlPlaneLab, result_of
from tests.support.planes.world import ApiWorld, eventually, open_world

LINES = tuple(f"line {number}" for number in range(20))
SCRIPT = by_run(
    {
        "quick": Act(run_s=0.2, lines=LINES),
        "fails": Act(
            run_s=0.1, kind=EndKind.EXITED, exit_code=3, lines=LINES, message="rank 0 exited with 3"
        ),
    },
    otherwise=Act(run_s=None, lines=LINES),
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiWorld]:
    with open_world(tmp_path_factory.mktemp("streams"), script=SCRIPT) as opened:
        yield opened


def printed(stream: AsgiStream) -> list[str]:
    """The lines that ranks printed, without Shoal's own lines."""
    lines = [data for kind, data, _ in stream.events() if kind == "line"]
    return [line["text"] for line in lines if line["rank"] is not None]


def test_a_followed_job_streams_its_attempt_its_lines_and_its_end(world: ApiWorld) -> None:
    job_id = world.submit("member", "vision", run="quick")
    with world.stream(f"/v1/jobs/{job_id}/logs/stream", role="viewer") as stream:
        eventually(lambda: stream.is_complete)
    kinds = [kind for kind, _, _ in stream.events()]
    assert (kinds[0], set(kinds[1:-1]), kinds[-1]) == ("attempt", {"line"}, "end")
    assert printed(stream) == list(LINES)
    assert stream.events()[-1][1] == {"status": "succeeded", "exit_code": 0, "because": ""}


@pytest.mark.parametrize(("query", "ranks"), [("whole", 2), ("any", None)])
def test_the_end_event_warns_of_ranks_that_may_be_copies(
    world: ApiWorld, query: str, ranks: int | None
) -> None:
    spec = {"run": "quick", "ranks_per_node": 2, "world": query}
    job_id = world.submit("member", "vision", **spec)
    with world.stream(f"/v1/jobs/{job_id}/logs/stream", role="viewer") as stream:
        eventually(lambda: stream.is_complete)
    assert stream.events()[-1][1].get("ranks_without_group") == ranks


def test_a_broken_stream_continues_where_it_broke(world: ApiWorld) -> None:
    job_id = world.submit("member", "vision", run="quick")
    path = f"/v1/jobs/{job_id}/logs/stream"
    with world.stream(path, role="viewer") as stream:
        eventually(lambda: stream.is_complete)
    for index, (kind, _, event_id) in enumerate(stream.events()[:-1]):
        if kind != "line" or event_id is None:
            continue
        with world.stream(path, role="viewer", headers=[("last-event-id", event_id)]) as rest:
            eventually(lambda rest=rest: rest.is_complete)  # type: ignore[misc]
        assert rest.events() == stream.events()[index + 1 :]


def test_a_retried_job_is_followed_into_its_next_attempt(world: ApiWorld) -> None:
    job_id = world.submit("member", "vision", run="fails", retry={"max": 1, "on": ["exit"], "backoff": 0})
    with world.stream(f"/v1/jobs/{job_id}/logs/stream?attempt=1", role="viewer") as stream:
        eventually(lambda: stream.is_complete, within_s=20)
    events = stream.events()
    assert [data["epoch"] for kind, data, _ in events if kind == "attempt"] == [1, 2]
    (again,) = [data for kind, data, _ in events if kind == "again"]
    assert (again["epoch"], again["reason"], again["exit_code"]) == (1, "exit", 3)
    assert "rank 0 exited with 3" in again["message"]
    assert printed(stream) == [*LINES, *LINES]
    assert events[-1][1]["exit_code"] == 3


def test_a_tail_shows_the_last_lines_and_then_follows(world: ApiWorld) -> None:
    job_id = world.submit("member", "vision", run="quick")
    eventually(lambda: world.call("GET", f"/v1/jobs/{job_id}", role="viewer").json()["status"] == "succeeded")
    with world.stream(f"/v1/jobs/{job_id}/logs/stream?tail=3&rank=0", role="viewer") as stream:
        eventually(lambda: stream.is_complete)
    assert printed(stream) == list(LINES[-3:])
    page = world.call("GET", f"/v1/jobs/{job_id}/logs?tail=2&rank=0", role="viewer").json()
    assert [item["text"] for item in page["items"]] == list(LINES[-2:])
    assert page["is_complete"]


def test_events_arrive_as_they_are_recorded_and_only_those_one_may_see(world: ApiWorld) -> None:
    with world.stream("/v1/events/stream", role="stranger") as stream:
        eventually(lambda: stream.status == 200)
        hidden = world.submit("member", "vision")
        shown = world.submit("stranger", "speech")
        eventually(lambda: shown in {data["job_id"] for _, data, _ in stream.events()})
    assert hidden not in {data["job_id"] for _, data, _ in stream.events()}
    assert {data["project"] for _, data, _ in stream.events()} == {"speech"}
    refs = {data["ref"] for _, data, _ in stream.events() if data["job_id"] == shown}
    listed = world.call("GET", f"/v1/events?job={shown}", role="stranger").json()["items"]
    assert (
        refs
        == {item["ref"] for item in listed}
        == {world.call("GET", f"/v1/jobs/{shown}", role="stranger").json()["ref"]}
    )


def test_an_event_stream_resumes_after_the_last_one_seen(world: ApiWorld) -> None:
    with world.stream("/v1/events/stream?after=0", role="operator") as stream:
        eventually(lambda: len(stream.events()) > 10)
    fifth = stream.events()[4][2]
    with world.stream("/v1/events/stream", role="operator", headers=[("last-event-id", str(fifth))]) as rest:
        eventually(lambda: len(rest.events()) > 3)
    assert rest.events()[0] == stream.events()[5]


@pytest.mark.parametrize("last_id", ["x", "-1", "9" * 30, "1.x"])
def test_a_last_event_id_of_another_kind_is_refused(world: ApiWorld, last_id: str) -> None:
    headers = [("last-event-id", last_id)]
    assert world.call("GET", "/v1/events/stream", role="viewer", headers=headers).status == 422
    path = f"/v1/jobs/{world.jobs['vision']}/logs/stream"
    assert world.call("GET", path, role="viewer", headers=headers).status in (404, 422)


def test_streams_are_limited_for_each_caller_and_slots_come_back(tmp_path: Path) -> None:
    with open_world(tmp_path, limits=ServerLimits(max_streams=3, max_streams_per_actor=2)) as world:
        with (
            world.stream("/v1/events/stream", role="viewer") as one,
            world.stream("/v1/events/stream", role="viewer") as two,
        ):
            eventually(lambda: one.status == two.status == 200)
            assert world.call("GET", "/v1/events/stream", role="viewer").status == 429
            with world.stream("/v1/events/stream", role="lead") as three:
                eventually(lambda: three.status == 200)
                assert world.call("GET", "/v1/events/stream", role="member").status == 429
        with world.stream("/v1/events/stream", role="viewer") as again:
            eventually(lambda: again.status == 200)


class BusyCluster:
    """A cluster with continuous commits."""

    async def wait(self, timeout_s: float) -> None:
        """Return at once."""


def test_a_quiet_job_is_not_looked_at_for_every_commit_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = ControlPlaneLab()
    job = lab.running_job()

    async def sleep(seconds: float) -> None:
        lab.clock.advance(seconds)

    monkeypatch.setattr("shoal.api.log_follower.anyio.sleep", sleep)
    monkeypatch.setattr(lab.core.signals, "commits", BusyCluster())
    call: Any = SimpleNamespace(core=lab.core)
    follower = log_follower._Follower(call, log_follower.LogFollowRequest(job.job_id, None, False, ALL, None))
    looks: list[float] = []
    while lab.clock.monotonic() < 30:
        result_of(follower.turn())
        looks.append(lab.clock.monotonic())
    assert len([at for at in looks if at < 2]) > 20
    assert len([at for at in looks if 10 <= at < 20]) <= 41


def test_an_attempt_that_its_cluster_lets_wait_is_placed_and_has_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def sleep(_seconds: float) -> None:
        """Take no time."""

    monkeypatch.setattr("shoal.api.log_follower.anyio.sleep", sleep)
    lab = ControlPlaneLab(script=lambda _: Act(claim_s=60.0, run_s=None), num_nodes=1)
    job = lab.running_job(resources={"nodes": 1, "cpus": 1})
    monkeypatch.setattr(lab.core.signals, "commits", BusyCluster())
    call: Any = SimpleNamespace(core=lab.core)
    wanted = log_follower.LogFollowRequest(job.job_id, None, is_resumed=False, lines=ALL, tail=None)
    follower = log_follower._Follower(call, wanted)
    attempt_id = lab.attempt(job).attempt_id
    assert result_of(follower.turn()) == (b"", False), "no event has named its place"
    message = "Slurm job 5 is PENDING (Resources)"
    lab.core.running.leases.note_trouble(attempt_id, "n1", message, is_queued=True)
    assert result_of(follower.turn()) == (b"", False), "it may begin in a moment"
    lab.clock.advance(log_follower.PLACED_S)
    out, _ = result_of(follower.turn())
    assert b"event: placed" in out
    assert b"id:" not in out, "a reader that is cut off here gets it again"
    assert message.encode() in out
    assert result_of(follower.turn()) == (b"", False), "once"
    lab.clock.advance(60)
    lab.watch()
    out, _ = result_of(follower.turn())
    assert b"event: attempt" in out


def test_follower_of_a_job_learns_that_its_cluster_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sleep(_seconds: float) -> None:
        """Take no time."""

    monkeypatch.setattr("shoal.api.log_follower.anyio.sleep", sleep)
    lab = ControlPlaneLab(num_nodes=1)
    lab.heal()
    job = lab.submit()
    monkeypatch.setattr(lab.core.signals, "commits", BusyCluster())
    call: Any = SimpleNamespace(core=lab.core)
    wanted = log_follower.LogFollowRequest(job.job_id, None, is_resumed=False, lines=ALL, tail=None)
    follower = log_follower._Follower(call, wanted)
    sent: list[bytes] = []

    def hang() -> None:
        with lab.core.link.outages.asking():
            for passed_s in (0.0, LATE_S, log_follower.PLACED_S):
                lab.clock.advance(passed_s)
                sent.append(result_of(follower.turn())[0])

    lab.engine.meanwhile("before submit", hang)
    lab.place()
    assert sent[:2] == [b"", b""]
    assert b"event: placed" in sent[2]
    assert b"the cluster cannot be asked" in sent[2]


def test_an_attempt_that_ended_before_it_began_has_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sleep(_seconds: float) -> None:
        """Take no time."""

    async def silent(_engine: object, attempt: Attempt, *_: object) -> JobLogPage:
        return JobLogPage([], LogPosition(attempt.epoch), is_complete=True)

    monkeypatch.setattr("shoal.api.log_follower.anyio.sleep", sleep)
    monkeypatch.setattr("shoal.api.log_follower.read_page", silent)
    lab = ControlPlaneLab(script=lambda _: Act(claim_s=60.0, run_s=None), num_nodes=1)
    job = lab.running_job(resources={"nodes": 1, "cpus": 1})
    monkeypatch.setattr(lab.core.signals, "commits", BusyCluster())
    call: Any = SimpleNamespace(core=lab.core)
    wanted = log_follower.LogFollowRequest(job.job_id, None, is_resumed=False, lines=ALL, tail=None)
    follower = log_follower._Follower(call, wanted)
    assert lab.attempt(job).state is AttemptState.STARTING
    lab.stop(job)
    lab.watch()
    ended = lab.attempt(job)
    assert (ended.state, ended.started_at, ended.node_names) == (AttemptState.ENDED, None, ("n1",))
    data, is_over = result_of(follower.turn())
    assert is_over
    assert b"event: end" in data
    assert b"event: attempt" not in data
