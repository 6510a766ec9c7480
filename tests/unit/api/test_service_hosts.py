"""A name in `Host` belongs to one service, and only leads give a service one; what serving again answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.asgi import Answer
from tests.support.world import World, eventually, open_world


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with open_world(tmp_path) as made:
        yield made


def serve(
    world: World, role: str, *hosts: str, project: str = "vision", run: str = "a", name: str = "x"
) -> Answer:
    spec = {"name": name, "run": run, "hosts": hosts}
    return world.call("POST", "/v1/services", role=role, data={"spec": spec, "project": project})


def hosts_in_table(world: World) -> dict[str, list[str]]:
    table = world.call("GET", "/v1/serving/table", role="data_plane").json()
    return {service["project"]: service["hosts"] for service in table["services"]}


def test_host_of_another_project_is_refused_with_its_owner_whoever_asks(world: World) -> None:
    assert serve(world, "lead", "llm.example.org").status == 201
    refused = serve(world, "admin", "own.example.org", "llm.example.org", project="speech")
    assert refused.status == 409
    assert "`llm.example.org` belongs to service `x` of project `vision`" in refused.json()["detail"]
    assert serve(world, "lead", "llm.example.org", name="y").status == 409
    assert serve(world, "admin", "own.example.org", project="speech").status == 201
    eventually(lambda: hosts_in_table(world).get("speech") == ["own.example.org"])
    assert hosts_in_table(world)["vision"] == ["llm.example.org"]


def test_member_may_not_claim_a_host_and_keeps_one_that_a_lead_claimed(world: World) -> None:
    assert serve(world, "member").status == 201
    refused = serve(world, "member", "llm.example.org", run="b")
    assert refused.status == 403
    assert "only leads may claim" in refused.json()["detail"]
    assert serve(world, "lead", "llm.example.org", run="b").status == 201
    assert serve(world, "member", "llm.example.org", run="c").status == 201
    assert serve(world, "member", "llm.example.org", "more.example.org", run="c").status == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "a.localhost", "10.1", "0x7f000001", "8.8.8.8"])
def test_addresses_and_names_of_the_cluster_are_no_services(world: World, host: str) -> None:
    refused = serve(world, "admin", host)
    assert refused.status == 422
    assert f"`{host}`" in refused.json()["detail"]


def test_host_is_not_free_while_an_undone_rollout_leads_back_to_it(world: World) -> None:
    assert serve(world, "lead", "llm.example.org").status == 201
    assert serve(world, "lead", run="b").status == 201
    assert serve(world, "admin", "llm.example.org", project="speech").status == 409


def test_served_again_the_answer_says_what_is_new_and_nothing_of_the_same(world: World) -> None:
    told = [serve(world, "member", run=run).json() for run in ("a", "a", "b", "b")]
    assert [(one["newest_release"], one["because"]) for one in told] == [
        (1, ""), (1, ""), (2, "`run` changed"), (2, ""),
    ]  # fmt: skip
