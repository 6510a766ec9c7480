"""Requests through the data plane of `shoal up`: they wake and scale a service, and roll back a canary."""

from __future__ import annotations

import http.client
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from shoal.cli.control_plane.home import running_data_plane
from tests.support.faults.service_faults import PATH, address_of, token_of
from tests.support.planes.real import RealPlane, until
from tests.support.serving.haproxy import needs_haproxy
from tests.support.serving.service import RepeatingCaller, ServedApp, server_pid

pytestmark = pytest.mark.slow


HAPROXY = pytest.param("haproxy", marks=needs_haproxy)
SOAKED = pytest.param("haproxy", marks=[needs_haproxy, pytest.mark.soak])
by_each = pytest.mark.parametrize("served", ["embedded", SOAKED], indirect=True)
by_haproxy = pytest.mark.parametrize("served", [HAPROXY], indirect=True)
"""The embedded one is tested under heavier load in `test_under_fire`."""


@pytest.fixture
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ServedApp]:
    kind = ("--data-plane", getattr(request, "param", "embedded"))
    plane = RealPlane(tmp_path / "home", "--serve-on", "127.0.0.1:0", *kind, demo="2x4")
    plane.up()
    folder = tmp_path / "hello"
    folder.mkdir()
    yield ServedApp(plane, folder)
    plane.down()


@by_haproxy
def test_no_request_fails_while_replicas_die_releases_roll_nodes_drain_and_the_control_plane_dies(
    served: ServedApp,
) -> None:
    served.serve(replicas=2)
    served.until_ready(2)
    with RepeatingCaller(address_of(served), PATH, token_of(served)) as caller:
        until(lambda: caller.answers["1"] > 20, "it is answered")
        [(first, address), *_] = served.replicas().items()
        os.kill(server_pid(address), signal.SIGKILL)
        served.until_other(first)
        served.until_ready(2)
        served.serve(replicas=2, env={"VERSION": "2"})
        until(lambda: served.plane.shoal.services.show("hello")["release"] == 2, "release 2 took over")
        node = served.plane.shoal.services.show("hello")["servers"][0]["nodes"][0]
        assert served.plane.command("drain", node).returncode == 0
        until(lambda: node not in served.nodes() and len(served.addresses()) == 2, f"nothing is on {node}")
        before = running_data_plane(served.plane.home)
        served.plane.kill()
        seen = caller.answers["2"]
        until(lambda: caller.answers["2"] > seen + 20, "it is answered without a control plane")
        served.plane.up()
        until(lambda: len(served.addresses()) == 2, "the new control plane knows its replicas")
        assert running_data_plane(served.plane.home) == before
    assert set(caller.statuses) == {200}
    assert set(caller.answers) == {"1", "2"}


@by_each
def test_canary_that_returns_errors_is_rolled_back_automatically(served: ServedApp) -> None:
    served.serve(replicas=2)
    served.until_ready(2)
    with RepeatingCaller(address_of(served), PATH + "work", token_of(served)) as caller:
        rollout = {"strategy": "canary", "steps": [30], "bake": "10m"}
        served.serve(replicas=2, env={"VERSION": "2", "BROKEN": "1"}, rollout=rollout)
        until(lambda: "rolled back" in served.plane.command("rollout", "hello").stdout, "it rolled back")
        until(lambda: len(served.addresses()) == 2, "only the old ones are left")
        until(lambda: _is_answered_well(caller), "the release that was taken back is called no more")
    assert set(caller.statuses) == {200, 500}


@by_each
def test_token_works_as_soon_as_it_is_printed_and_fails_as_soon_as_it_is_revoked(served: ServedApp) -> None:
    served.serve()
    served.until_ready(1)
    address, tokens = address_of(served), served.plane.shoal.tokens
    until(lambda: status(address, token_of(served)) == 200, "it is served")
    for _ in range(5):
        token = tokens.create(project="default", service="hello")
        assert status(address, token["text"]) == 200
        tokens.revoke(token["id"])
        assert status(address, token["text"]) == 401


@by_each
def test_service_scaled_to_zero_refuses_until_it_has_a_replica_again(served: ServedApp) -> None:
    served.serve()
    served.until_ready(1)
    address, token = address_of(served), token_of(served)
    assert served.plane.command("scale", "hello", "0").returncode == 0
    until(lambda: status(address, token) == 503, "nobody is there")
    assert served.plane.command("scale", "hello", "1").returncode == 0
    until(lambda: status(address, token) == 200, "somebody is there again")


def status(address: str, token: str) -> int:
    link = http.client.HTTPConnection(address, timeout=30)
    try:
        link.request("GET", PATH, headers={"Authorization": f"Bearer {token}"})
        return link.getresponse().status
    finally:
        link.close()


@by_haproxy
def test_serve_reports_settings_that_haproxy_ignores(served: ServedApp) -> None:
    served.serve(replicas=1)
    served.file.write_text(served.file.read_text().replace('"replicas":1', '"replicas":"0..2"'))
    done = served.plane.command("serve", str(served.file))
    assert done.returncode == 2
    assert "HAProxy cannot hold requests until there is one" in done.stderr
    assert "shoal up --data-plane embedded" in done.stderr


def test_service_sleeps_without_requests_and_wakes_for_the_next(served: ServedApp) -> None:
    scale = {"value": 1, "cooldown": 4, "to_zero_after": 8, "window": 2}
    served.serve(replicas="0..2", scale=scale)
    address = address_of(served)
    for _ in range(2):
        with RepeatingCaller(address, PATH, token_of(served)) as caller:
            until(lambda: sum(caller.statuses.values()) > 5, "held requests are answered")
        assert set(caller.statuses) == {200}
        until(lambda: not served.plane.shoal.services.show("hello")["servers"], "it sleeps")


def test_load_scales_a_service_from_zero_to_the_maximum_and_back_without_a_lost_request(
    served: ServedApp,
) -> None:
    scale = {"value": 1, "cooldown": 4, "to_zero_after": 8, "window": 2}
    served.serve(replicas="0..4", cap=1, scale=scale)
    address, token = address_of(served), token_of(served)
    callers = [RepeatingCaller(address, PATH + "slow", token) for _ in range(6)]
    with ExitStack() as all_of_them:
        all_of_them.enter_context(callers[0])
        until(lambda: callers[0].statuses[200] > 2, "the first one was held until a replica was ready")
        for caller in callers[1:]:
            all_of_them.enter_context(caller)
        served.until_ready(4)
        until(lambda: all(caller.statuses[200] > 2 for caller in callers), "everybody is answered")
    until(lambda: not served.plane.shoal.services.show("hello")["servers"], "it sleeps")
    assert {status for caller in callers for status in caller.statuses} == {200}
    shown = served.plane.shoal.services.show("hello")
    sizes = [resize["replicas"] for resize in shown["resizes"]]
    top = sizes.index(4)
    assert (sizes[0], sizes[-2:]) == (1, [1, 0])
    assert sizes == sorted(sizes[:top]) + sorted(sizes[top:], reverse=True), "up, then down, and never back"
    assert "no request for" in served.plane.command("services", "hello").stdout


def _is_answered_well(caller: RepeatingCaller) -> bool:
    """Return whether it had 50 replies without an error. Data planes learn last which replicas are left."""
    bad, good = caller.statuses[500], caller.statuses[200]
    until(lambda: caller.statuses[200] > good + 50, "it is answered")
    return caller.statuses[500] == bad
