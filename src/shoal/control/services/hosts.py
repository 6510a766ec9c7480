"""Who has which name in `Host`. A name belongs to one service of the whole cluster, from the release that
claims it for as long as the service may come back to that release.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence

from shoal.control.core import Core
from shoal.control.services.replicas import spec_of_release
from shoal.errors import Denied, SpecError, StateError
from shoal.model.service import Service
from shoal.serving.table import is_shared_name
from shoal.spec.service import ServiceSpec
from shoal.store import Tx


def check_hosts(
    core: Core, tx: Tx, project: str, spec: ServiceSpec, known: Service | None, *, may_claim: bool
) -> None:
    """Raises unless every host of it is this service's already, or free and its sender may claim it."""
    held = set() if known is None else _held(tx, known)
    for host in spec.hosts:
        if _is_ours(core, host):
            raise SpecError(
                f"`hosts` has `{host}`, which is an address or a name of the cluster itself",
                hint="use a name of the service's own, such as `chat.example.org`",
            )
        owner = None if host in held else _owner(tx, host, known)
        if owner is not None:
            raise StateError(
                f"host `{host}` belongs to service `{owner.name}` of project `{owner.project}`",
                hint=f"take another; it is free once two releases of `{owner.reference}` in a row do without "
                f"it, or after `shoal stop {owner.reference}`",
            )
        if host not in held and not may_claim:
            raise Denied(
                f"host `{host}` is nobody's yet; in project `{project}` only leads may claim one",
                hint="have a lead `shoal serve` this file once; from then on you may",
            )


def granted(core: Core, services: Sequence[tuple[Service, ServiceSpec]]) -> dict[str, tuple[str, ...]]:
    """By service: the hosts that lead to it. Of two with one name, older than the check, the elder."""
    taken: set[str] = set()
    found: dict[str, tuple[str, ...]] = {}
    for service, spec in sorted(services, key=lambda one: (one[0].created_at, one[0].service_id)):
        own = tuple(host for host in spec.hosts if host not in taken and not _is_ours(core, host))
        taken.update(own)
        found[service.service_id] = own
    return found


def _is_ours(core: Core, host: str) -> bool:
    settings = core.settings
    names = {settings.host, settings.serve_host, *settings.allowed_hosts, platform.node()}
    return is_shared_name(host) or host in {name.lower() for name in names}


def _owner(tx: Tx, host: str, known: Service | None) -> Service | None:
    others = (one for one in tx.services.all() if known is None or one.service_id != known.service_id)
    return next((one for one in others if host in _held(tx, one)), None)


def _held(tx: Tx, service: Service) -> set[str]:
    """Of all releases that may serve without being served anew."""
    numbers = {service.live, service.newest}
    numbers |= {service.rollout.old, service.rollout.new} if service.rollout else set()
    releases = (tx.services.release(service.service_id, number) for number in numbers)
    return {host for one in releases if one is not None for host in spec_of_release(one.spec_json).hosts}
