"""Tokens for one service open that service, and nothing of Shoal's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.serving.admission.accounts import digest_of
from tests.support.planes.world import ApiWorld, eventually, open_world


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ApiWorld]:
    with open_world(tmp_path) as made:
        yield made


def test_service_token_calls_its_service_and_is_refused_by_the_api(world: ApiWorld) -> None:
    spec = {"name": "chat", "run": "sleep 1000"}
    assert (
        world.call("POST", "/v1/services", role="member", data={"spec": spec, "project": "vision"}).status
        == 201
    )
    body = {"label": "the app", "project": "vision", "service": "chat"}
    text = world.call("POST", "/v1/tokens", role="member", data=body).json()["text"]
    assert world.call("GET", "/v1/me", token=text).status == 401
    assert world.call("GET", "/v1/services", token=text).status == 401

    def digests() -> set[str]:
        table = world.call("GET", "/v1/serving/table", role="data_plane").json()
        return {one["digest"] for service in table["services"] for one in service["callers"]}

    eventually(lambda: digest_of(text) in digests())


def test_token_of_a_service_needs_a_project_that_one_is_in(world: ApiWorld) -> None:
    for project, status in ((None, 422), ("speech", 404), ("vision", 201)):
        body = {"service": "chat"} if project is None else {"service": "chat", "project": project}
        assert world.call("POST", "/v1/tokens", role="member", data=body).status == status


def test_request_for_the_serving_table_with_its_tag_is_answered_when_the_table_changes(
    world: ApiWorld,
) -> None:
    first = world.call("GET", "/v1/serving/table", role="data_plane")
    table = first.json()
    tag = ("if-none-match", f'"{table["epoch"]}-{table["version"]}"')
    assert world.call("GET", "/v1/serving/table", role="data_plane", headers=[tag]).status == 304
    spec = {"name": "chat", "run": "sleep 1000"}
    world.call("POST", "/v1/services", role="member", data={"spec": spec, "project": "vision"})
    newer = world.call("GET", "/v1/serving/table?wait_s=20", role="data_plane", headers=[tag])
    assert [service["name"] for service in newer.json()["services"]] == ["chat"]


def test_data_plane_with_a_higher_version_of_another_epoch_gets_the_table(world: ApiWorld) -> None:
    table = world.call("GET", "/v1/serving/table", role="data_plane").json()
    for epoch, status in ((f"{table['epoch']}-", 304), ("0123abcd-", 200), ("", 304)):
        tag = ("if-none-match", f'"{epoch}{table["version"] + 10_000_000}"')
        assert world.call("GET", "/v1/serving/table", role="data_plane", headers=[tag]).status == status


def test_malformed_serving_report_is_refused(world: ApiWorld) -> None:
    for body in ({"process_id": "p"}, {"process_id": "p", "version": "x"}, {"version": 1}):
        assert world.call("POST", "/v1/serving/reports", role="data_plane", data=body).status == 422
