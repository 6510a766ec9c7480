"""A name in `Host` belongs to one service, and only leads give it to one; the reply to serving again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.planes.asgi import AsgiReply
from tests.support.planes.world import ApiWorld, eventually, open_world


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ApiWorld]:
    with open_world(tmp_path) as made:
        yield made


def serve(
    world: ApiWorld, role: str, *hosts: str, project: str = "vision", run: str = "a", name: str = "x"
) -> AsgiReply:
    spec = {"name": name, "run": run, "hosts": hosts}
    return world.call("POST", "/v1/services", role=role, data={"spec": spec, "project": project})


def hosts_in_table(world: ApiWorld) -> dict[str, list[str]]:
    table = world.call("GET", "/v1/serving/table", role="data_plane").json()
    return {service["project"]: service["hosts"] for service in table["services"]}


def test_host_of_another_project_is_refused_with_its_owner_for_every_role(world: ApiWorld) -> None:
    assert serve(world, "lead", "llm.example.org").status == 201
    refused = serve(world, "admin", "own.example.org", "llm.example.org", project="speech")
    assert refused.status == 409
    assert "`llm.example.org` belongs to service `x` of project `vision`" in refused.json()["detail"]
    assert serve(world, "lead", "llm.example.org", name="y").status == 409
    assert serve(world, "admin", "own.example.org", project="speech").status == 201
    eventually(lambda: hosts_in_table(world).get("speech") == ["own.example.org"])
    assert hosts_in_table(world)["vision"] == ["llm.example.org"]


def test_member_may_not_claim_a_host_and_keeps_one_that_a_lead_claimed(world: ApiWorld) -> None:
    assert serve(world, "member").status == 201
    refused = serve(world, "member", "llm.example.org", run="b")
    assert refused.status == 403
    assert "only leads may claim" in refused.json()["detail"]
    assert serve(world, "lead", "llm.example.org", run="b").status == 201
    assert serve(world, "member", "llm.example.org", run="c").status == 201
    assert serve(world, "member", "llm.example.org", "more.example.org", run="c").status == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "a.localhost", "10.1", "0x7f000001", "8.8.8.8"])
def test_addresses_and_names_of_the_cluster_are_no_services(world: ApiWorld, host: str) -> None:
    refused = serve(world, "admin", host)
    assert refused.status == 422
    assert f"`{host}`" in refused.json()["detail"]


def test_host_is_not_free_while_an_undone_rollout_leads_back_to_it(world: ApiWorld) -> None:
    assert serve(world, "lead", "llm.example.org").status == 201
    assert serve(world, "lead", run="b").status == 201
    assert serve(world, "admin", "llm.example.org", project="speech").status == 409


def test_serving_again_reports_what_is_new_and_nothing_for_the_same_spec(world: ApiWorld) -> None:
    replies = [serve(world, "member", run=run).json() for run in ("a", "a", "b", "b")]
    assert [(one["newest_release"], one["because"]) for one in replies] == [
        (1, ""), (1, ""), (2, "`run` changed"), (2, ""),
    ]  # fmt: skip
