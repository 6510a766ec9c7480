"""Tokens for one service open that service, and nothing of Shoal's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.serving.callers import digest_of
from tests.support.world import World, eventually, open_world


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with open_world(tmp_path) as made:
        yield made


def test_token_of_a_service_is_a_caller_of_it_and_nobody_to_the_api(world: World) -> None:
    spec = {"name": "chat", "run": "sleep 1000"}
    assert (
        world.call("POST", "/v1/services", role="member", data={"spec": spec, "project": "vision"}).status
        == 201
    )
    asked = {"label": "the app", "project": "vision", "service": "chat"}
    text = world.call("POST", "/v1/tokens", role="member", data=asked).json()["text"]
    assert world.call("GET", "/v1/me", token=text).status == 401
    assert world.call("GET", "/v1/services", token=text).status == 401

    def digests() -> set[str]:
        table = world.call("GET", "/v1/serving/table", role="data_plane").json()
        return {one["digest"] for service in table["services"] for one in service["callers"]}

    eventually(lambda: digest_of(text) in digests())


def test_token_of_a_service_needs_a_project_that_one_is_in(world: World) -> None:
    for project, status in ((None, 422), ("speech", 404), ("vision", 201)):
        asked = {"service": "chat"} if project is None else {"service": "chat", "project": project}
        assert world.call("POST", "/v1/tokens", role="member", data=asked).status == status


def test_table_is_asked_for_by_its_tag_and_answered_when_it_changes(world: World) -> None:
    first = world.call("GET", "/v1/serving/table", role="data_plane")
    told = first.json()
    tag = ("if-none-match", f'"{told["epoch"]}-{told["version"]}"')
    assert world.call("GET", "/v1/serving/table", role="data_plane", headers=[tag]).status == 304
    spec = {"name": "chat", "run": "sleep 1000"}
    world.call("POST", "/v1/services", role="member", data={"spec": spec, "project": "vision"})
    newer = world.call("GET", "/v1/serving/table?wait_s=20", role="data_plane", headers=[tag])
    assert [service["name"] for service in newer.json()["services"]] == ["chat"]


def test_table_is_told_to_who_has_a_higher_version_of_another_history(world: World) -> None:
    told = world.call("GET", "/v1/serving/table", role="data_plane").json()
    for epoch, status in ((f"{told['epoch']}-", 304), ("0123abcd-", 200), ("", 304)):
        tag = ("if-none-match", f'"{epoch}{told["version"] + 10_000_000}"')
        assert world.call("GET", "/v1/serving/table", role="data_plane", headers=[tag]).status == status


def test_what_is_no_report_is_refused(world: World) -> None:
    for body in ({"process_id": "p"}, {"process_id": "p", "version": "x"}, {"version": 1}):
        assert world.call("POST", "/v1/serving/reports", role="data_plane", data=body).status == 422
