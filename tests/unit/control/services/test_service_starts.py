"""How long replicas take from the request to their first reply, in parts, and what that decides."""

from __future__ import annotations

import anyio
import msgspec
import pytest

from shoal.control.services.commands import ServiceRequest
from shoal.control.services.reconcile import reconcile_services
from shoal.control.services.replicas import record_status
from shoal.control.services.snapshot import load_snapshot
from shoal.model.service import ReplicaStart, Service
from shoal.spec.parse import parse_service
from shoal.wire import ReplicaStatus
from tests.support.planes.bench import ANA, USER, ControlPlaneLab, result_of

SPEC = {"name": "chat", "run": "serve", "workdir": None, "resources": {"cpus": 1}, "replicas": 2}


def a_start(starting_s: float, loading_s: float, queued_s: float = 0.0) -> ReplicaStart:
    return ReplicaStart(release=1, queued_s=queued_s, starting_s=starting_s, loading_s=loading_s)


def the_service(lab: ControlPlaneLab) -> Service:
    [service] = lab.read(lambda tx: tx.services.all())
    return service


def test_start_is_recorded_in_parts_and_outlives_its_replica() -> None:
    lab = ControlPlaneLab()
    request = ServiceRequest(spec=parse_service(SPEC), project="lab", owner=USER)
    result_of(lab.plane.serve(ANA, request, key=None))
    anyio.run(reconcile_services, lab.core.admission, lab.core.serving, lab.core.running)
    lab.clock.advance(3.0)  # they were never placed
    lab.run_loops()
    service = the_service(lab)
    assert service.starts == ()
    look = lab.read(lambda tx: load_snapshot(tx, service.service_id))
    assert look is not None
    for replica, _, attempt in look.replicas:
        assert attempt.placed_at is not None
        lab.clock.advance(5.0)
        status = ReplicaStatus(address=f"127.0.0.1:{1000 + replica.slot}", is_ready=True, at=lab.clock.now())
        started = msgspec.structs.replace(attempt, started_at=attempt.placed_at + 2.0)
        result_of(record_status(lab.core.records, lab.core.running, lab.core.services, started, status))
        again = msgspec.structs.replace(status, is_ready=False, because="status 500")
        for report in (again, status):
            lab.clock.advance(1.0)
            result_of(record_status(lab.core.records, lab.core.running, lab.core.services, started, report))
    first, second = the_service(lab).starts
    assert (first.queued_s, first.starting_s) == pytest.approx((3.0, 2.0), abs=0.1)
    assert first.loading_s == pytest.approx(3.0, abs=0.1)
    assert second.loading_s == pytest.approx(10.0, abs=0.1)
    result_of(lab.plane.scale_service(ANA, service.service_id, 0, 0, key=None))
    for _ in range(4):
        lab.clock.advance(60.0)
        anyio.run(reconcile_services, lab.core.admission, lab.core.serving, lab.core.running)
        lab.run_loops()
    assert lab.read(lambda tx: tx.services.replicas(service.service_id)) == []
    assert the_service(lab).starts == (first, second)


def test_cold_start_is_the_median_without_the_wait_for_room() -> None:
    lab = ControlPlaneLab()
    result_of(
        lab.plane.serve(ANA, ServiceRequest(spec=parse_service(SPEC), project="lab", owner=USER), key=None)
    )
    service = the_service(lab)
    assert service.cold_start_s == 0.0
    starts = (a_start(1.0, 9.0), a_start(1.0, 99.0, queued_s=7200.0), a_start(2.0, 10.0))
    assert msgspec.structs.replace(service, starts=starts).cold_start_s == 12.0
