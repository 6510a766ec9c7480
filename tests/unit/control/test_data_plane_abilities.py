"""A service that asks for what the cluster's data plane does not do is refused when it is served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.control import Actor
from shoal.control.services.abilities import check_data_plane, check_port
from shoal.control.services.commands import AskedService
from shoal.errors import SpecError
from shoal.settings import Settings
from shoal.spec.parse import parse_service
from tests.support.plane import open_plane

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


@pytest.mark.parametrize("fields,told", BEYOND_HAPROXY)
def test_what_haproxy_does_not_do_is_refused_with_the_way_out(fields: dict[str, Any], told: str) -> None:
    spec = parse_service({**ASKED, **fields})
    with pytest.raises(SpecError, match=told) as refused:
        check_data_plane(Settings(home=Path("/nowhere"), data_plane="haproxy"), spec)
    assert "shoal up --data-plane embedded" in str(refused.value.hint)
    check_data_plane(Settings(home=Path("/nowhere")), spec)


@pytest.mark.parametrize(
    "fields", [{}, {"replicas": "1..4"}, {"replicas": 0}, {"scale": {"target": "queue"}}]
)
def test_the_rest_is_served_by_either(fields: dict[str, Any]) -> None:
    check_data_plane(
        Settings(home=Path("/nowhere"), data_plane="haproxy"), parse_service({**ASKED, **fields})
    )


def test_ports_of_shoal_itself_and_of_the_machine_are_no_services(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    own = (settings.port, settings.serve_port)
    for port in own:
        with pytest.raises(SpecError, match=f"port {port}, which is Shoal's own"):
            check_port(parse_service({**ASKED, "port": port}), own)
        check_port(parse_service({**ASKED, "port": port, "network": "private"}), own)
    with pytest.raises(SpecError, match="port 1023, which is the machine's own"):
        check_port(parse_service({**ASKED, "port": 1023}), own)
    for free in (None, "socket", 1024):
        check_port(parse_service({**ASKED, "port": free}), own)


@pytest.mark.anyio
async def test_neither_serve_nor_scale_lets_it_pass(tmp_path: Path) -> None:
    async with open_plane(tmp_path) as plane:
        plane.core.settings = replace(plane.core.settings, data_plane="haproxy")
        await plane.create_project(ROOT, "vision", {})
        user = await plane.create_user(ROOT, "ana")

        def asked(**fields: Any) -> AskedService:
            return AskedService(spec=parse_service({**ASKED, **fields}), project="vision", owner=user)

        with pytest.raises(SpecError, match="HAProxy"):
            await plane.serve(ROOT, asked(replicas="0..2"))
        made = await plane.serve(ROOT, asked(replicas="1..2"))
        with pytest.raises(SpecError, match=r"asks for 0\.\.2 replicas"):
            await plane.scale_service(ROOT, made.service_id, 0, 2)
        await plane.scale_service(ROOT, made.service_id, 0, 0)
