"""A service that asks for something the cluster's data plane cannot do is refused when it is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.control import Actor
from shoal.control.services.commands import ServiceRequest
from shoal.control.services.release_checks import check_data_plane, check_port
from shoal.errors import SpecError
from shoal.settings import Settings
from shoal.spec.parse import parse_service
from tests.support.planes.world import open_plane

ROOT = Actor(kind="user", id="usr_root", name="root")
ASKED: dict[str, Any] = {"name": "chat", "run": "serve"}
BEYOND_HAPROXY = [
    ({"replicas": "0..4"}, "asks for 0..4 replicas"),
    ({"balance": "tokens"}, "asks for `balance: tokens`"),
    ({"scale": {"target": "tokens"}}, "scales by `tokens`"),
    ({"scale": {"sleep_after": "5m"}}, "may sleep"),
    ({"hedge_after": "200ms"}, "asks for `hedge_after`"),
    ({"port": "socket"}, "asks for `port: socket`"),
    ({"network": "private"}, "asks for `network: private`"),
]


@pytest.mark.parametrize("fields,message", BEYOND_HAPROXY)
def test_feature_that_haproxy_lacks_is_refused_with_a_hint(fields: dict[str, Any], message: str) -> None:
    spec = parse_service({**ASKED, **fields})
    with pytest.raises(SpecError, match=message) as refused:
        check_data_plane(Settings(home=Path("/nowhere"), data_plane="haproxy"), spec)
    assert "shoal up --data-plane embedded" in str(refused.value.hint)
    check_data_plane(Settings(home=Path("/nowhere")), spec)


@pytest.mark.parametrize(
    "fields", [{}, {"replicas": "1..4"}, {"replicas": 0}, {"scale": {"target": "queue"}}]
)
def test_other_features_are_served_by_both_data_planes(fields: dict[str, Any]) -> None:
    check_data_plane(
        Settings(home=Path("/nowhere"), data_plane="haproxy"), parse_service({**ASKED, **fields})
    )


def test_port_of_shoal_or_below_1024_is_refused(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    reserved = (settings.port, settings.serve_port)
    for port in reserved:
        with pytest.raises(SpecError, match=f"port {port}, which is Shoal's own"):
            check_port(parse_service({**ASKED, "port": port}), reserved)
        check_port(parse_service({**ASKED, "port": port, "network": "private"}), reserved)
    with pytest.raises(SpecError, match="port 1023, which is the machine's own"):
        check_port(parse_service({**ASKED, "port": 1023}), reserved)
    for free in (None, "socket", 1024):
        check_port(parse_service({**ASKED, "port": free}), reserved)


@pytest.mark.anyio
async def test_serve_and_scale_both_refuse_it(tmp_path: Path) -> None:
    async with open_plane(tmp_path, data_plane="haproxy") as plane:
        await plane.create_project(ROOT, "vision", {})
        user = await plane.create_user(ROOT, "ana")

        def asked(**fields: Any) -> ServiceRequest:
            return ServiceRequest(spec=parse_service({**ASKED, **fields}), project="vision", owner=user)

        with pytest.raises(SpecError, match="HAProxy"):
            await plane.serve(ROOT, asked(replicas="0..2"))
        service = await plane.serve(ROOT, asked(replicas="1..2"))
        with pytest.raises(SpecError, match=r"asks for 0\.\.2 replicas"):
            await plane.scale_service(ROOT, service.service_id, 0, 2)
        await plane.scale_service(ROOT, service.service_id, 0, 0)
