"""Why a job waits, over HTTP: how much it reveals of jobs in projects that the reader may not see."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from shoal.control.memory.start_predictions import MAX_ASKING
from shoal.model.attempt import AttemptState
from tests.support.planes.world import ApiWorld, eventually, open_world

WHOLE = {"nodes": 2, "exclusive": True}
SECRET = ("hush-hush", "dora", "speech")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiWorld]:
    """`speech` waits for both nodes, first and promised; behind it `vision` waits, and then `speech`."""
    with open_world(tmp_path_factory.mktemp("why")) as opened:
        for project in ("vision", "speech"):
            opened.call("POST", f"/v1/jobs/{opened.jobs[project]}/stop", role="admin")
            opened.until_state(opened.jobs[project], AttemptState.ENDED)
        opened.jobs["held"] = opened.submit("member", "vision", time_limit="2h", resources={"cpus": 1})
        opened.until_state(opened.jobs["held"], AttemptState.RUNNING)
        opened.jobs["first"] = opened.submit(
            "stranger", "speech", name="hush-hush", resources=WHOLE, priority=10
        )
        opened.jobs["behind"] = opened.submit("member", "vision", name="later", resources={"cpus": 1})
        opened.jobs["own"] = opened.submit("stranger", "speech", name="own", resources={"cpus": 1})
        eventually(lambda: all(is_planned(opened, job) for job in ("behind", "own")))
        yield opened


def is_planned(world: ApiWorld, job: str) -> bool:
    return "behind_job_id" in (why(world, "admin", job)["explanation"] or {}).get("facts", {})


def why(world: ApiWorld, role: str, job: str, *, predict: bool = False) -> dict[str, Any]:
    path = f"/v1/jobs/{world.jobs[job]}/why?predict={str(predict).lower()}"
    answer = world.call("GET", path, role=role)
    assert answer.status == 200, answer.body
    body: dict[str, Any] = answer.json()
    return body


def test_job_behind_another_projects_job_shows_only_times_that_affect_it(
    world: ApiWorld,
) -> None:
    body = why(world, "member", "behind", predict=True)
    explanation = body["explanation"]
    assert explanation["why"] == "behind"
    assert "waits behind a job of another project" in explanation["sentence"]
    assert set(explanation["facts"]) == {"behind_job_id", "queue", "kept_from"}
    assert explanation["facts"]["behind_job_id"] is None
    assert explanation["facts"]["kept_from"] is not None
    assert not any("waited" in line for line in explanation["details"])
    text = json.dumps(body)
    assert world.jobs["first"] not in text
    assert not any(word in text for word in SECRET)


def test_job_behind_a_job_of_its_own_project_names_it(world: ApiWorld) -> None:
    explanation = why(world, "stranger", "own")["explanation"]
    assert explanation["facts"]["behind_job_id"] == world.jobs["first"]
    assert "hush-hush" in explanation["sentence"]
    assert "has waited" in explanation["details"][0]


def test_explanation_reveals_nothing_of_a_job_that_the_reader_may_not_see(world: ApiWorld) -> None:
    assert world.call("GET", f"/v1/jobs/{world.jobs['first']}/why", role="member").status == 404


def test_too_many_predictions_at_once_are_refused_with_a_retry(world: ApiWorld) -> None:
    foreseen, release = world.plane.core.planning.predictions, anyio.Event()

    async def ask(who: int) -> None:
        async with foreseen.one_at_a_time(str(who)):
            await release.wait()

    busy = [world.portal.start_task_soon(ask, who) for who in range(MAX_ASKING + 1)]
    eventually(lambda: foreseen._asking.total() == MAX_ASKING + 1)
    path = f"/v1/jobs/{world.jobs['behind']}/why"
    answer = world.call("GET", f"{path}?predict=true", role="member")
    assert (answer.status, answer.header("retry-after")) == (429, "1")
    assert answer.json()["hint"] == "ask again in a few seconds"
    assert world.call("GET", path, role="member").status == 200
    world.portal.call(release.set)
    for one in busy:
        one.result(timeout=10)
    assert world.call("GET", f"{path}?predict=true", role="member").status == 200
