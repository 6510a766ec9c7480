"""Replicas on other machines: the certificates with which data planes and sidecars find each other."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from shoal.clock import SystemClock
from shoal.control.actor import SHOAL
from shoal.control.bootstrap import DEFAULT_PROJECT
from shoal.control.services.commands import ServiceRequest
from shoal.control.services.state import IDENTITY_RENEW_S, SidecarIdentities
from shoal.identity.authority import make_authority
from shoal.sidecar_tls import sidecar_name
from shoal.spec.parse import parse_service
from shoal.wire import Renewal, ReplicaStatus, TaskAssignment, TaskPhase, TaskSpecRequest
from tests.support.planes.commands import Commands
from tests.unit.control.test_mailbox import plane, waiting

pytestmark = pytest.mark.anyio
__all__ = ["plane"]


class HandClock(SystemClock):
    ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_s


async def until(is_so: Callable[[], object]) -> None:
    with anyio.fail_after(30):
        while not is_so():  # noqa: ASYNC110 - nobody tells
            await anyio.sleep(0.02)


async def begun(plane: Commands) -> TaskAssignment:
    """A replica whose supervisor has its task spec."""
    plane.core.services.sidecar_identities = SidecarIdentities(
        make_authority("a test's", SystemClock().now()), SystemClock()
    )
    owner = next(iter(await plane.core.records.store.read(lambda tx: tx.people.users())))
    spec = parse_service({"name": "chat", "run": "serve"})
    await plane.serve(SHOAL, ServiceRequest(spec=spec, project=DEFAULT_PROJECT, owner=owner))
    mailbox = plane.core.link.engine.mailbox  # type: ignore[attr-defined]
    await until(mailbox.tasks)
    [task] = mailbox.tasks()
    request = TaskSpecRequest(attempt_id=task.task_spec.identity.attempt_id, node="n1", process="a" * 32)
    return await plane.assign_task(request)


def renewal(assignment: TaskAssignment, address: str) -> Renewal:
    task_spec = assignment.task_spec
    return Renewal(
        attempt_id=task_spec.identity.attempt_id,
        epoch=task_spec.identity.epoch,
        node=task_spec.identity.node,
        phase=TaskPhase.RUNNING,
        started_at=SystemClock().now(),
        replica_status=ReplicaStatus(address=address, is_ready=True, at=SystemClock().now()),
    )


async def test_task_spec_of_a_replica_comes_with_a_sidecar_identity(plane: Commands) -> None:
    assignment = await begun(plane)
    identity = assignment.credentials.sidecar
    assert identity is not None
    assert "PRIVATE KEY" in identity.key
    again = await plane.assign_task(
        TaskSpecRequest(attempt_id=assignment.task_spec.identity.attempt_id, node="n1", process="a" * 32)
    )
    assert again.credentials.sidecar not in (None, identity), "each call makes another: none is stored"


async def test_task_spec_of_a_job_has_no_sidecar_identity(plane: Commands) -> None:
    plane.core.services.sidecar_identities = SidecarIdentities(
        make_authority("a test's", SystemClock().now()), SystemClock()
    )
    assert (await plane.assign_task(await waiting(plane))).credentials.sidecar is None


async def test_table_names_the_sidecar_and_the_data_planes_identity(plane: Commands) -> None:
    assignment = await begun(plane)
    await plane.renew(renewal(assignment, "tls:10.0.0.7:19000"))
    state = plane.core.services
    await until(lambda: state.table.services and state.table.services[0].replicas)
    [replica] = state.table.services[0].replicas
    assert (replica.address, replica.name) == (
        "tls:10.0.0.7:19000",
        sidecar_name(assignment.task_spec.identity.attempt_id),
    )
    assert plane.core.services.sidecar_identities is not None
    assert state.table.tls_identity == plane.core.services.sidecar_identities.for_data_planes()


async def test_replica_that_claims_an_address_of_the_control_plane_gets_no_requests(
    plane: Commands,
) -> None:
    assignment = await begun(plane)
    await plane.renew(renewal(assignment, "127.0.0.1:22"))
    replica = await plane.core.records.store.read(
        lambda tx: tx.services.replica(assignment.task_spec.identity.job_id)
    )
    assert replica is not None
    assert (replica.is_ready, replica.address) == (False, "")
    assert "127.0.0.1:22" in replica.because


def test_data_planes_get_a_new_identity_long_before_the_old_one_expires() -> None:
    clock = HandClock()
    identities = SidecarIdentities(make_authority("a test's", clock.now()), clock)
    first = identities.for_data_planes()
    assert identities.for_data_planes() is first
    clock.ahead_s = IDENTITY_RENEW_S + 1
    assert identities.for_data_planes() != first
