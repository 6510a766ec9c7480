"""Two control planes on a real PostgreSQL: one leads, and is killed, frozen or stopped; the other goes on."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from shoal.client import Shoal
from shoal.client.handles import JobHandle
from shoal.errors import ShoalError, StandingBy
from shoal.home import pid_holding
from tests.support.host.postgres import PostgresServer, postgres
from tests.support.planes.real import TAKEOVER_S, PairedPlane, RankGate, TwoPlanes, two_planes, until

__all__ = ["postgres"]  # pytest finds the fixture by its name

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
END_S = 15.0
"""The limit that `shoal down` promises."""


@pytest.fixture(scope="module")
def database(postgres: PostgresServer) -> str:
    return postgres.new_database()


@pytest.fixture(scope="module")
def pair(
    postgres: PostgresServer, database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoPlanes]:
    with two_planes(TwoPlanes(tmp_path_factory.mktemp("two"), postgres.url(database))) as planes:
        yield planes


@pytest.fixture
def planes(pair: TwoPlanes) -> TwoPlanes:
    pair.ensure_roles()
    return pair


@pytest.fixture
def shoal(planes: TwoPlanes) -> Iterator[Shoal]:
    with planes.client() as client:
        yield client


class Submitter(threading.Thread):
    """Submits until it is stopped, each job under its own key until it is acknowledged, and once more."""

    def __init__(self, shoal: Shoal, after: JobHandle) -> None:
        super().__init__()
        self._shoal = shoal
        self._after = after
        self._is_over = threading.Event()
        self.acknowledged: dict[str, str] = {}
        self.refused: list[ShoalError] = []
        self.longest_s = 0.0

    def run(self) -> None:
        number = 0
        while not self._is_over.is_set():
            began = time.monotonic()
            try:
                first, again = self._submit(number), self._submit(number)
            except ShoalError as error:
                self.refused.append(error)
                continue
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            assert first.job_id == again.job_id
            self.acknowledged[f"{self._after.job_id}-{number}"] = first.job_id
            number += 1

    def _submit(self, number: int) -> JobHandle:
        return self._shoal.submit(
            run="true",
            workdir=None,
            name="waits",
            after=[self._after.job_id],
            key=f"{self._after.job_id}-{number}",
        )

    def finish(self) -> None:
        self._is_over.set()
        self.join()


def submit(shoal: Shoal, run: str) -> JobHandle:
    return shoal.submit(run=run, workdir=None, resources={"gpus": 1}, ranks_per_node=1)


def until_status(job: JobHandle, *wanted: str) -> JobHandle:
    until(lambda: job.refresh().status in wanted, f"{job.ref} is {' or '.join(wanted)}", TAKEOVER_S)
    return job


def terms(shoal: Shoal) -> list[tuple[int, str]]:
    return [
        (event["data"]["term"], event["data"]["url"])
        for event in shoal.events(kind="control.", limit=100)
        if event["kind"] == "control.leads"
    ]


def test_second_control_plane_stands_by_and_names_the_leader(planes: TwoPlanes) -> None:
    first, second = planes.first, planes.second
    assert first.role == "leader"  # and degraded, perhaps, if it has just been without a database
    assert second.health() == {"status": "ok", "role": "standby", "leader": first.url}
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(f"{second.url}/v1/jobs", timeout=10.0)
    body = json.load(raised.value)
    assert (raised.value.code, body["code"], body["leader"]) == (503, "control.standing_by", first.url)
    again = second.command("up")
    assert f"stands by: {first.url} leads" in again.stdout
    with (
        Shoal(env=planes.env(second.url)) as alone,
        pytest.raises(StandingBy, match=f"is on standby; {first.url} leads"),
    ):
        alone.status()


def test_home_that_does_not_share_is_refused_at_once(
    planes: TwoPlanes, postgres: PostgresServer, database: str, tmp_path: Path
) -> None:
    flags = ("--database", postgres.url(database), "--shared", str(tmp_path / "elsewhere"))
    third = PairedPlane(tmp_path / "third", *flags)
    done = third.command("up", *third._flags)
    assert done.returncode != 0
    assert "belongs to another SHOAL_HOME" in done.stderr
    assert "--shared" in done.stderr
    assert planes.first.role == "leader"


def test_job_survives_a_kill_of_the_leader_and_each_submission_is_one_job(
    planes: TwoPlanes, shoal: Shoal, gate: RankGate
) -> None:
    job = submit(shoal, gate.run_line(exit_code=4))
    gate.wait_for_ranks()
    (before,) = until_status(job, "running").data["attempts"]
    led = terms(shoal)
    with planes.client() as other:
        submitter = Submitter(other, job)
        submitter.start()
        try:
            until(lambda: len(submitter.acknowledged) >= 3, "some jobs are accepted")
            num_acknowledged = len(submitter.acknowledged)
            planes.first.kill()
            killed_at = time.monotonic()
            until(
                lambda: len(submitter.acknowledged) > num_acknowledged + 3,
                "the other one accepts",
                TAKEOVER_S,
            )
            took_s = time.monotonic() - killed_at
        finally:
            submitter.finish()
    print(f"accepted again {took_s:.1f} s after the kill; the longest pair took {submitter.longest_s:.1f} s")
    assert planes.second.role == "leader"
    assert submitter.refused == []
    (after,) = until_status(job, "running").data["attempts"]
    assert after["attempt_id"] == before["attempt_id"]
    gate.open()
    until_status(job, "failed")
    assert (job.exit_code, len(job.data["attempts"])) == (4, 1)
    assert len(gate.held) == 1
    listed = [data["job_id"] for data in shoal.jobs(name="waits")]
    assert sorted(listed) == sorted(submitter.acknowledged.values())
    assert terms(shoal) == [*led, (led[-1][0] + 1, planes.second.url)]
    assert shoal.verify_audit()["is_intact"]


def test_supervisor_renews_with_the_leader_and_stops_on_its_reply(
    planes: TwoPlanes, shoal: Shoal, gate: RankGate
) -> None:
    """Its supervisor was started by another process than the one it now has to find."""
    job = submit(shoal, gate.run_line())
    gate.wait_for_ranks()
    until_status(job, "running")
    leader_file = planes.shared / "leader.json"

    def led_by() -> str:
        return str(json.loads(leader_file.read_text())["url"])

    until(lambda: led_by() == planes.first.url, "supervisors are told of the first")
    planes.first.kill()
    planes.second.until_role("leader")
    until(lambda: led_by() == planes.second.url, "supervisors are told of the second")
    assert planes.first.start()["role"] == "standby"
    job.stop()
    until_status(job, "cancelled")
    until(lambda: gate.is_gone(0), "its rank is gone")


def test_frozen_leader_writes_nothing_after_it_was_followed_and_steps_down(
    planes: TwoPlanes, shoal: Shoal, gate: RankGate, postgres: PostgresServer, database: str
) -> None:
    job = submit(shoal, gate.run_line(exit_code=5))
    gate.wait_for_ranks()
    until_status(job, "running")
    led = terms(shoal)
    frozen = planes.first.pid
    os.kill(frozen, signal.SIGSTOP)
    replies: list[object] = []
    # Requests to the frozen control plane are answered when it wakes up. By then it must know that it no
    # longer leads.
    late = threading.Thread(target=_submit_to, args=(planes, "late", replies))
    late.start()
    try:
        planes.second.until_role("leader")
        with planes.client() as other:
            other.submit(run="true", workdir=None, name="meanwhile", key="meanwhile")
        before = _log(postgres, database)
    finally:
        os.kill(frozen, signal.SIGCONT)
    planes.first.until_role("standby")
    late.join(TAKEOVER_S)
    assert planes.first.pid == frozen, "the same process steps down"
    assert planes.first.health()["leader"] == planes.second.url
    assert isinstance(replies[0], Exception), replies
    assert [data["name"] for data in shoal.jobs() if data["name"] == "late"] == []
    assert _log(postgres, database)[: len(before)] == before, "the log was written by one alone"
    gate.open()
    until_status(job, "failed")
    assert (job.exit_code, len(job.data["attempts"])) == (5, 1)
    assert terms(shoal) == [*led, (led[-1][0] + 1, planes.second.url)]
    assert shoal.verify_audit()["is_intact"]
    # And it leads again when its turn comes.
    planes.second.kill()
    planes.first.until_role("leader")
    assert terms(shoal)[-1] == (led[-1][0] + 2, planes.first.url)


def test_both_are_killed_and_started_again_the_other_way_round(
    planes: TwoPlanes, shoal: Shoal, gate: RankGate
) -> None:
    job = submit(shoal, gate.run_line(exit_code=6))
    gate.wait_for_ranks()
    (before,) = until_status(job, "running").data["attempts"]
    planes.second.kill()
    planes.first.kill()
    assert planes.second.start()["role"] == "leader"
    assert planes.first.start()["role"] == "standby"
    (after,) = until_status(job, "running").data["attempts"]
    assert after["attempt_id"] == before["attempt_id"]
    gate.open()
    until_status(job, "failed")
    assert (job.exit_code, len(job.data["attempts"])) == (6, 1)


@pytest.mark.parametrize("is_database_frozen", [False, True], ids=["well", "hanging"])
def test_leader_that_is_stopped_hands_over_to_the_other(
    planes: TwoPlanes, shoal: Shoal, postgres: PostgresServer, *, is_database_frozen: bool
) -> None:
    submit(shoal, "true").wait(TAKEOVER_S)
    pid = planes.first.pid
    if is_database_frozen:
        postgres.freeze()
    began = time.monotonic()
    try:
        os.kill(pid, signal.SIGTERM)
        until(lambda: pid_holding(planes.first.home) is None, "the leader ends", END_S)
        ended_s = time.monotonic() - began
    finally:
        if is_database_frozen:
            postgres.thaw()
    planes.second.until_role("leader")
    print(f"ended after {ended_s:.1f} s; the other leads after {time.monotonic() - began:.1f} s")
    assert submit(shoal, "true").wait(TAKEOVER_S).status == "succeeded"


def test_database_that_goes_away_and_comes_back_has_one_leader_again(
    planes: TwoPlanes, shoal: Shoal, gate: RankGate, postgres: PostgresServer
) -> None:
    job = submit(shoal, gate.run_line(exit_code=7))
    gate.wait_for_ranks()
    until_status(job, "running")
    postgres.stop(signal.SIGQUIT)
    until(lambda: planes.second.health().get("status") == "degraded", "the standby sees no database")
    postgres.start()
    until(
        lambda: sorted(str(plane.role) for plane in (planes.first, planes.second)) == ["leader", "standby"],
        "one of them leads",
        TAKEOVER_S,
    )
    gate.open()
    until_status(job, "failed")
    assert (job.exit_code, len(job.data["attempts"])) == (7, 1)
    assert shoal.verify_audit()["is_intact"]


def _submit_to(planes: TwoPlanes, name: str, replies: list[object]) -> None:
    """Submit to the first control plane only."""
    try:
        with Shoal(env=planes.env(planes.first.url), patience_s=0.0) as alone:
            replies.append(alone.submit(run="true", workdir=None, name=name, key=name))
    except (ShoalError, OSError) as error:
        replies.append(error)


def _log(postgres: PostgresServer, database: str) -> list[tuple[int, str]]:
    with psycopg.connect(postgres.dsn(database)) as connection:
        return connection.execute("SELECT seq, hash FROM events ORDER BY seq").fetchall()
