"""Refuse what this cluster or its data plane cannot do, before anybody relies on it."""

from __future__ import annotations

from collections.abc import Collection

from shoal.errors import SpecError
from shoal.settings import Settings
from shoal.spec.service import ServiceSpec

HINT = (
    "leave it out, or have the embedded data plane serve: `shoal down` and `shoal up --data-plane embedded`"
)
FIRST_PORT = 1024
"""No job may bind below."""


def check_data_plane(settings: Settings, spec: ServiceSpec) -> None:
    found = _zero(settings, spec.name, spec.replicas.min, spec.replicas.max)
    if settings.data_plane == "haproxy":
        if spec.balance == "tokens":
            found.append(f"service `{spec.name}` asks for `balance: tokens`; HAProxy knows requests alone")
        if spec.scale.target == "tokens":
            found.append(f"service `{spec.name}` scales by `tokens`, which HAProxy does not count")
        if spec.scale.sleep_after is not None:
            found.append(f"service `{spec.name}` may sleep; HAProxy cannot hold requests until it is awake")
        if spec.hedge_after is not None:
            found.append(f"service `{spec.name}` asks for `hedge_after`; HAProxy asks one replica at a time")
        if spec.port == "socket" or spec.network == "private":
            way = "port: socket" if spec.port == "socket" else "network: private"
            found.append(f"service `{spec.name}` asks for `{way}`; HAProxy reaches ports of a machine alone")
    _refuse(found)


def check_port(spec: ServiceSpec, own: Collection[int | None]) -> None:
    """`own`: ports of the control plane and the data plane, whose callers send tokens there.

    Not a rule of the field itself: a release that was recorded before must still be read.
    """
    if spec.network == "private" or not isinstance(spec.port, int):
        return
    why = "Shoal's own" if spec.port in own else "the machine's own: services have 1024 and above"
    if spec.port in own or spec.port < FIRST_PORT:
        raise SpecError(
            f"service `{spec.name}` asks for port {spec.port}, which is {why}",
            hint="leave `port` out and have the server listen at $PORT, or choose another port",
        )


def check_range(settings: Settings, name: str, low: int, high: int) -> None:
    """Of replicas, where nothing else changes."""
    _refuse(_zero(settings, name, low, high))


def _zero(settings: Settings, name: str, low: int, high: int) -> list[str]:
    if settings.data_plane != "haproxy" or low > 0 or high == 0:
        return []
    return [
        f"service `{name}` asks for {low}..{high} replicas; HAProxy cannot hold requests until there is one"
    ]


def _refuse(found: list[str]) -> None:
    if found:
        raise SpecError("; ".join(found), problems=tuple(found), hint=HINT)
