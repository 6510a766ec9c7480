"""A service whose last replica sleeps: no data plane sends it requests by then, and the first request wakes
it.
"""

from __future__ import annotations

from typing import Any

import anyio
import msgspec

from shoal.control.services.commands import ServiceRequest
from shoal.control.services.reconcile import reconcile_services
from shoal.control.services.snapshot import load_snapshot
from shoal.model.attempt import Attempt
from shoal.model.service import Replica
from shoal.serving.table import ReleaseCounters, ServingReport
from shoal.spec.parse import parse_service
from shoal.wire import Renewal, RenewalReply, ReplicaStatus, TaskPhase
from tests.support.planes.bench import ANA, USER, ControlPlaneLab, result_of

SPEC = {"name": "chat", "run": "serve", "workdir": None, "resources": {"cpus": 1}}


class Bench:
    """One replica, its supervisor and one data plane. The test chooses what each reports."""

    def __init__(self, **scale: Any) -> None:
        self.lab = ControlPlaneLab()
        spec = parse_service({**SPEC, "scale": {"sleep_after": 10, **scale}})
        result_of(self.lab.plane.serve(ANA, ServiceRequest(spec=spec, project="lab", owner=USER), key=None))
        self.tend()
        self.lab.run_loops()
        self.serving = ReplicaStatus(address="127.0.0.1:1000", is_ready=True, at=self.lab.clock.now())
        self.renew()
        self.tend()

    def tend(self) -> None:
        anyio.run(reconcile_services, self.lab.core.admission, self.lab.core.serving, self.lab.core.running)

    def replica(self) -> tuple[Replica, Attempt]:
        [service] = self.lab.read(lambda tx: tx.services.all())
        look = self.lab.read(lambda tx: load_snapshot(tx, service.service_id))
        assert look is not None
        [(replica, _, attempt)] = look.replicas
        return replica, attempt

    def renew(self) -> RenewalReply:
        _, attempt = self.replica()
        renewal = Renewal(
            attempt_id=attempt.attempt_id,
            epoch=attempt.epoch,
            node=attempt.node_names[0],
            phase=TaskPhase.RUNNING,
            replica_status=self.serving,
        )
        return result_of(self.lab.plane.renew(renewal))

    def count(self, seconds: int, *, version: int | None = None, queued: int = 0) -> None:
        """The data plane reports the same for this many seconds."""
        state = self.lab.core.services
        for _ in range(seconds):
            self.lab.clock.advance(1.0)
            count = ReleaseCounters(project="lab", name="chat", release=1, queued=queued)
            applied = state.table.version if version is None else version
            report = ServingReport(process_id="prc_1", version=applied, counts=(count,))
            state.note_report(report, self.lab.core.records.clock.monotonic())
            self.tend()

    def sleep(self) -> None:
        self.count(14)
        assert self.renew().should_sleep is True
        status = {"is_ready": False, "is_asleep": True, "because": "asleep"}
        self.serving = msgspec.structs.replace(self.serving, **status)
        assert self.renew().should_sleep is None
        self.tend()

    def given(self) -> list[bool]:
        """For each replica that data planes know: whether it drains."""
        [service] = self.lab.core.services.table.services
        return [replica.is_draining for replica in service.replicas]


def test_replica_sleeps_once_no_data_plane_uses_it_and_wakes_for_the_first_request() -> None:
    bench = Bench()
    old = bench.lab.core.services.table.version
    bench.count(9)
    assert bench.given() == [False]
    bench.count(5, version=old)
    assert bench.given() == [True]
    assert bench.renew().should_sleep is None  # a data plane does not know of it
    bench.count(1)
    bench.sleep()
    assert bench.given() == []
    assert bench.replica()[0].is_asleep
    bench.count(1, queued=1)
    assert bench.renew().should_sleep is False
    status = {"is_ready": True, "is_asleep": False, "because": ""}
    bench.serving = msgspec.structs.replace(bench.serving, **status)
    assert bench.renew().should_sleep is None
    bench.tend()
    assert bench.given() == [False]
    kinds = [event.kind for event in bench.lab.events() if event.kind in ("service.slept", "service.woken")]
    assert kinds == ["service.slept", "service.woken"]


def test_restarted_control_plane_leaves_a_sleeping_replica_asleep() -> None:
    bench = Bench()
    bench.sleep()
    bench.lab.restart()
    bench.tend()
    assert bench.renew().should_sleep is None
    bench.tend()
    assert bench.renew().should_sleep is None
    assert bench.replica()[0].is_asleep


def test_new_release_wakes_the_replicas_that_it_replaces() -> None:
    bench = Bench()
    bench.sleep()
    spec = parse_service({**SPEC, "scale": {"sleep_after": 10}, "env": {"V": "2"}})
    result_of(bench.lab.plane.serve(ANA, ServiceRequest(spec=spec, project="lab", owner=USER), key=None))
    bench.tend()
    [service] = bench.lab.read(lambda tx: tx.services.all())
    assert not service.is_asleep


def test_service_that_cannot_sleep_gets_no_sleep_order() -> None:
    bench = Bench(sleep_after=None)
    bench.count(30)
    assert bench.renew().should_sleep is None
    assert bench.given() == [False]


def test_callers_of_a_service_that_can_sleep_may_not_manage_its_server() -> None:
    for sleep_after, is_closed in ((10, True), (None, False)):
        [served] = Bench(sleep_after=sleep_after).lab.core.services.table.services
        assert ({"sleep", "wake_up", "collective_rpc"} <= served.closed) is is_closed
