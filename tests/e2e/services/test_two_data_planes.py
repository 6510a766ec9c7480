"""Two control planes, each with a data plane: after a failover the old data plane follows the new leader."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli.control_plane import home
from shoal.client import Shoal
from tests.support.host.postgres import PostgresServer, postgres
from tests.support.planes.real import TAKEOVER_S, PairedPlane, TwoPlanes, two_planes, until
from tests.support.serving.service import SERVER

__all__ = ["postgres"]  # pytest finds the fixture by its name

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def planes(postgres: PostgresServer, tmp_path: Path) -> Iterator[TwoPlanes]:
    pair = TwoPlanes(tmp_path, postgres.url(postgres.new_database()), "--serve-on", "127.0.0.1:0")
    with two_planes(pair):
        yield pair
    for plane in (pair.first, pair.second):
        home.stop_data_plane(plane.home)  # it outlives its control plane


def data_plane(plane: PairedPlane) -> str:
    """Return the address of this home's data plane."""
    return str(json.loads((plane.home / "serving.json").read_text())["url"])


def status(url: str, token: str = "") -> int:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10.0) as answer:
            body = answer.read().decode()
            return 200 if not token or body.startswith("1 ") else 299
    except urllib.error.HTTPError as error:
        return error.code


def serve(shoal: Shoal, folder: Path, version: str) -> None:
    spec = {
        "kind": "service",
        "name": "hello",
        "run": "exec python3 server.py",
        "env": {"VERSION": version},
        "readiness": {"path": "/health", "interval": 0.1, "failures": 1},
        "resources": {"gpus": 1},
        "drain": 0.2,
    }
    shoal.services.serve(spec, workdir=folder, env={})


def test_old_data_plane_follows_the_new_leader(planes: TwoPlanes, tmp_path: Path) -> None:
    folder = tmp_path / "hello"
    folder.mkdir()
    (folder / "server.py").write_text(SERVER)
    with planes.client() as shoal:
        serve(shoal, folder, "1")
        try:
            follow(planes, shoal, folder)
        finally:
            planes.ensure_roles()
            shoal.services.stop("hello")
            until(lambda: not shoal.services.all(), "the service is gone", TAKEOVER_S)


def follow(planes: TwoPlanes, shoal: Shoal, folder: Path) -> None:
    revoked = shoal.tokens.create()
    until((planes.first.home / "serving.json").exists, "the first one's data plane listens", TAKEOVER_S)
    old = data_plane(planes.first)
    call = f"{old}/default/hello/"
    until(lambda: status(call, revoked["text"]) == 200, "it serves the service", TAKEOVER_S)
    assert status(f"{old}/-/health") == 200

    planes.first.kill()
    planes.second.until_role("leader")
    shoal.tokens.revoke(revoked["id"])
    until(lambda: status(call, revoked["text"]) == 401, "it refuses the revoked token", TAKEOVER_S)
    token = shoal.tokens.create()["text"]
    until(lambda: status(call, token) == 200, "it takes a new token", TAKEOVER_S)
    serve(shoal, folder, "2")
    until(lambda: status(call, token) == 299, "it serves the new release", TAKEOVER_S)
    until(lambda: status(f"{old}/-/health") == 200, "its check says that it is well", TAKEOVER_S)
    assert data_plane(planes.second) != old

    planes.second.kill()
    until(lambda: status(f"{old}/-/health") == 503, "without a control plane its check fails", TAKEOVER_S)
    assert status(call, token) == 299, "it serves what it knows"
