"""The same control plane on a real PostgreSQL, which is stopped and crashed under it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import psycopg
import pytest

from shoal.client import Shoal
from shoal.client.handles import JobHandle
from shoal.control.opening import open_core
from shoal.errors import ShoalError, StateError
from shoal.settings import Settings
from shoal.store.hash_chain import chain_hash
from tests.support.host.postgres import PostgresServer, postgres
from tests.support.planes.real import RankGate, RealPlane, running_plane, until

__all__ = ["postgres"]  # pytest finds the fixture by its name

NUM_BEFORE = 5
"""Acknowledged before the database goes away."""


@pytest.fixture(scope="module")
def url(postgres: PostgresServer) -> str:
    return postgres.url(postgres.new_database())


@pytest.fixture(scope="module")
def plane(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPlane]:
    with running_plane(tmp_path_factory.mktemp("postgres") / "home", "--database", url) as real:
        yield real


class Submitter(threading.Thread):
    """Submits until it is stopped, each job under its own key until it is acknowledged."""

    def __init__(self, plane: RealPlane, after: JobHandle) -> None:
        super().__init__()
        self._plane = plane
        self._after = after
        self._is_over = threading.Event()
        self.acknowledged: dict[str, str] = {}
        self.refused: list[ShoalError] = []

    def run(self) -> None:
        number = 0
        with Shoal(env=self._plane.env) as shoal:
            while not self._is_over.is_set():
                key = f"{self._after.job_id}-{number}"
                try:
                    job = shoal.submit(
                        run="true", workdir=None, name="waits", after=[self._after.job_id], key=key
                    )
                except ShoalError as error:
                    self.refused.append(error)
                    continue
                self.acknowledged[key] = job.job_id
                number += 1
                self._is_over.wait(0.05)

    def finish(self) -> None:
        self._is_over.set()
        self.join()


def test_a_running_gang_is_adopted_after_a_kill(plane: RealPlane, gate: RankGate) -> None:
    job = plane.submit(gate.run_line(exit_code=4), resources={"nodes": 2, "gpus": 2})
    gate.wait_for_ranks(2)
    (before,) = plane.attempts(plane.until_status(job, "running"))
    plane.kill()
    plane.up()
    (after,) = plane.attempts(plane.until_status(job, "running"))
    assert after["attempt_id"] == before["attempt_id"]
    gate.open()
    plane.until_status(job, "failed")
    assert (job.exit_code, len(plane.attempts(job))) == (4, 1)


def test_another_home_cannot_take_the_database_and_with_it_the_jobs(
    plane: RealPlane, gate: RankGate, url: str, tmp_path: Path
) -> None:
    job = plane.submit(gate.run_line(exit_code=4))
    gate.wait_for_ranks()
    (before,) = plane.attempts(plane.until_status(job, "running"))
    settings = Settings(home=tmp_path / "other", port=0, database_url=url)

    async def start() -> None:
        async with open_core(settings):
            pass

    with pytest.raises(StateError, match="another control plane"):
        anyio.run(start)
    plane.kill()
    with pytest.raises(StateError, match="another SHOAL_HOME"):
        anyio.run(start)
    assert not (tmp_path / "other" / "keys").exists(), "it is still a home without a past"
    plane.up()
    (after,) = plane.attempts(plane.until_status(job, "running"))
    assert after["attempt_id"] == before["attempt_id"]
    gate.open()
    plane.until_status(job, "failed")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["stopped", "crashed"])
def test_a_database_that_goes_away_and_comes_back_loses_nothing(
    plane: RealPlane, gate: RankGate, postgres: PostgresServer, how: signal.Signals
) -> None:
    server = plane.up()
    job = plane.submit(gate.run_line(exit_code=6))
    gate.wait_for_ranks()
    plane.until_status(job, "running")
    submitter = Submitter(plane, job)
    submitter.start()
    try:
        until(lambda: len(submitter.acknowledged) >= NUM_BEFORE, "some jobs are accepted")
        postgres.stop(how)
        num_acknowledged = len(submitter.acknowledged)
        gate.open()
        until(lambda: gate.is_gone(0), "the job ends while there is no database")
        assert len(submitter.acknowledged) <= num_acknowledged + 1, "accepted without a database"
        postgres.start()
        num_acknowledged = len(submitter.acknowledged)
        until(lambda: len(submitter.acknowledged) > num_acknowledged, "jobs are accepted again")
    finally:
        submitter.finish()
    os.kill(server, 0)
    assert plane.up() == server, "the same control plane recovered by itself"
    plane.until_status(job, "failed")
    assert (job.exit_code, len(plane.attempts(job))) == (6, 1)
    accepted = set(submitter.acknowledged.values())
    listed = [data["job_id"] for data in plane.shoal.jobs(name="waits")]
    assert len(listed) == len(set(listed))
    assert accepted <= set(listed)
    until(
        lambda: not list(plane.shoal.jobs(name="waits", status=("queued",))),
        "none of them is left waiting",
    )
    assert plane.shoal.verify_audit()["is_intact"]


def test_log_entry_forged_without_the_key_is_found(postgres: PostgresServer, tmp_path: Path) -> None:
    url = postgres.url(postgres.new_database())
    with running_plane(tmp_path / "home", "--database", url) as plane:
        assert plane.shoal.verify_audit()["is_intact"]
        plane.kill()
        kind, actor, data = "member.set", "user:eve", '{"role":"admin"}'
        with psycopg.connect(url.replace("+psycopg", "")) as file:
            seq, before = file.execute(
                "SELECT seq, hash FROM events ORDER BY seq DESC LIMIT 1"
            ).fetchone() or (0, "")
            forged = chain_hash(b"", before, seq + 1, 1.0, kind, actor, None, None, None, None, data, None)
            file.execute(
                "INSERT INTO events (seq, hash, at, kind, actor, data) VALUES (%s, %s, 1, %s, %s, %s)",
                (seq + 1, forged, kind, actor, data),
            )
        plane.up()
        verdict = plane.shoal.verify_audit()
        assert (verdict["is_intact"], verdict["first_bad"]) == (False, seq + 1)
