"""Why a job waits, over HTTP: what is said of the jobs of projects that the reader may not see."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from shoal.control.foreseen import MAX_ASKING
from shoal.model.attempt import AttemptState
from tests.support.world import World, eventually, open_world

WHOLE = {"nodes": 2, "exclusive": True}
SECRET = ("hush-hush", "dora", "speech")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
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


def is_planned(world: World, job: str) -> bool:
    return "behind_job_id" in (why(world, "admin", job)["explanation"] or {}).get("facts", {})


def why(world: World, role: str, job: str, *, predict: bool = False) -> dict[str, Any]:
    asked = f"/v1/jobs/{world.jobs[job]}/why?predict={str(predict).lower()}"
    answer = world.call("GET", asked, role=role)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json()
    return found


def test_job_behind_one_of_another_project_is_told_no_more_than_when_it_matters_to_it(world: World) -> None:
    told = why(world, "member", "behind", predict=True)
    explanation = told["explanation"]
    assert explanation["why"] == "behind"
    assert "waits behind a job of another project" in explanation["sentence"]
    assert set(explanation["facts"]) == {"behind_job_id", "queue", "kept_from"}
    assert explanation["facts"]["behind_job_id"] is None
    assert explanation["facts"]["kept_from"] is not None
    assert not any("waited" in line for line in explanation["details"])
    text = json.dumps(told)
    assert world.jobs["first"] not in text
    assert not any(word in text for word in SECRET)


def test_job_behind_one_of_its_own_project_is_told_which(world: World) -> None:
    explanation = why(world, "stranger", "own")["explanation"]
    assert explanation["facts"]["behind_job_id"] == world.jobs["first"]
    assert "hush-hush" in explanation["sentence"]
    assert "has waited" in explanation["details"][0]


def test_nothing_is_told_of_a_job_that_the_reader_may_not_see(world: World) -> None:
    assert world.call("GET", f"/v1/jobs/{world.jobs['first']}/why", role="member").status == 404


def test_question_that_is_one_too_many_is_told_to_come_back(world: World) -> None:
    foreseen, release = world.plane.core.foreseen, anyio.Event()

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
