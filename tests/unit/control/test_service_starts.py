"""How long replicas take from the wish for them to their first answer, in parts, and what that decides."""

from __future__ import annotations

import anyio
import msgspec
import pytest

from shoal.control.services.commands import AskedService
from shoal.control.services.look import load
from shoal.control.services.replicas import heard
from shoal.control.services.turn import tend
from shoal.model.service import Service, Start
from shoal.spec.parse import parse_service
from shoal.wire import Serving
from tests.support.lab import ANA, USER, Lab, now

SPEC = {"name": "chat", "run": "serve", "workdir": None, "resources": {"cpus": 1}, "replicas": 2}


def a_start(starting_s: float, loading_s: float, queued_s: float = 0.0) -> Start:
    return Start(release=1, queued_s=queued_s, starting_s=starting_s, loading_s=loading_s)


def the_service(lab: Lab) -> Service:
    [service] = lab.read(lambda tx: tx.services.all())
    return service


def test_start_is_told_in_its_parts_and_outlives_its_replica() -> None:
    lab = Lab()
    asked = AskedService(spec=parse_service(SPEC), project="lab", owner=USER)
    now(lab.plane.serve(ANA, asked, key=None))
    anyio.run(tend, lab.core)
    lab.clock.advance(3.0)  # nobody placed them
    lab.turn()
    service = the_service(lab)
    assert service.starts == ()
    look = lab.read(lambda tx: load(tx, service.service_id))
    assert look is not None
    for replica, _, attempt in look.servers:
        assert attempt.placed_at is not None
        lab.clock.advance(5.0)
        said = Serving(address=f"127.0.0.1:{1000 + replica.slot}", is_ready=True, at=lab.clock.now())
        started = msgspec.structs.replace(attempt, started_at=attempt.placed_at + 2.0)
        now(heard(lab.core, started, said))
        again = msgspec.structs.replace(said, is_ready=False, because="status 500")
        for told in (again, said):
            lab.clock.advance(1.0)
            now(heard(lab.core, started, told))
    first, second = the_service(lab).starts
    assert (first.queued_s, first.starting_s) == pytest.approx((3.0, 2.0), abs=0.1)
    assert first.loading_s == pytest.approx(3.0, abs=0.1)
    assert second.loading_s == pytest.approx(10.0, abs=0.1)
    now(lab.plane.scale_service(ANA, service.service_id, 0, 0, key=None))
    for _ in range(4):
        lab.clock.advance(60.0)
        anyio.run(tend, lab.core)
        lab.turn()
    assert lab.read(lambda tx: tx.services.replicas(service.service_id)) == []
    assert the_service(lab).starts == (first, second)


def test_middle_of_the_last_starts_counts_and_no_wait_for_room() -> None:
    lab = Lab()
    now(lab.plane.serve(ANA, AskedService(spec=parse_service(SPEC), project="lab", owner=USER), key=None))
    service = the_service(lab)
    assert service.cold_start_s == 0.0
    starts = (a_start(1.0, 9.0), a_start(1.0, 99.0, queued_s=7200.0), a_start(2.0, 10.0))
    assert msgspec.structs.replace(service, starts=starts).cold_start_s == 12.0
