"""Every command of a control plane in a short form, for tests. The API calls the commands themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from shoal.control.actor import Actor
from shoal.control.commands import (
    arrays,
    audit,
    drills,
    explain,
    jobs,
    mailbox,
    nodes,
    people,
    renewals,
    submit,
    tokens,
    windows,
)
from shoal.control.commands.arrays import ArrayStop
from shoal.control.commands.drills import DrillRequest
from shoal.control.commands.submit import SubmitRequest, SubmitResult
from shoal.control.commands.tokens import TokenRevocation
from shoal.control.commands.windows import WindowRequest
from shoal.control.core import Core
from shoal.control.job_specs import FrozenSpec
from shoal.control.loops.runner import run_loops
from shoal.control.services import commands as services
from shoal.control.services.commands import ServiceRequest
from shoal.errors import ShoalError
from shoal.model.attempt import Attempt
from shoal.model.drill import Drill
from shoal.model.job import Job
from shoal.model.node import NodeState, Window
from shoal.model.people import Membership, Project, Role, Token, User
from shoal.model.service import Service
from shoal.scheduler import Explanation
from shoal.settings import Settings
from shoal.spec import JobSpec
from shoal.wire import (
    LeftBehind,
    Renewal,
    RenewalReply,
    StatusReply,
    StatusReport,
    TaskAssignment,
    TaskSpecRequest,
)


class Commands:
    """All commands of the control plane. Each change is one transaction with its event, idempotent by `key`,
    and on disk when the method returns.
    """

    def __init__(self, core: Core) -> None:
        self.core = core

    @property
    def settings(self) -> Settings:
        return self.core.settings

    @classmethod
    @asynccontextmanager
    async def running(cls, core: Core) -> AsyncIterator[Commands]:
        """Run the loops while the block lasts."""
        plane = cls(core)
        async with run_loops(core):
            yield plane

    async def submit(
        self,
        actor: Actor,
        spec: JobSpec | FrozenSpec,
        *,
        project: str,
        owner: User,
        key: str | None = None,
        archive_digest: str | None = None,
        left_behind: LeftBehind | None = None,
        secrets: dict[str, str] | None = None,
        raw_request: bytes | None = None,
        refusal: ShoalError | None = None,
    ) -> SubmitResult:
        """Submit a job.

        `raw_request`: the request as it came, if it came from outside. `refusal`: what the caller found
        missing. It is raised unless the key was accepted before.
        """
        request = SubmitRequest(
            spec=spec,
            project=project,
            owner=owner,
            archive_digest=archive_digest,
            left_behind=left_behind,
            secrets=secrets or {},
            raw_request=raw_request,
            refusal=refusal,
        )
        return await submit.submit(self.core.admission, actor, request, key)

    async def serve(self, actor: Actor, request: ServiceRequest, *, key: str | None = None) -> Service:
        return await services.serve(self.core.admission, self.core.services, actor, request, key)

    async def scale_service(
        self, actor: Actor, service_id: str, low: int, high: int, *, key: str | None = None
    ) -> Service:
        return await services.scale(
            self.core.records, self.core.services, self.core.settings, actor, service_id, low, high, key
        )

    async def undo_rollout(self, actor: Actor, service_id: str, *, key: str | None = None) -> Service:
        return await services.undo_rollout(self.core.records, self.core.services, actor, service_id, key)

    async def promote_rollout(self, actor: Actor, service_id: str, *, key: str | None = None) -> Service:
        return await services.promote_rollout(self.core.records, self.core.services, actor, service_id, key)

    async def stop_service(self, actor: Actor, service_id: str, *, key: str | None = None) -> Service:
        return await services.stop(self.core.records, self.core.services, actor, service_id, key)

    async def stop_job(self, actor: Actor, job_id: str, *, key: str | None = None) -> Job:
        return await jobs.stop_job(self.core.records, self.core.link.engine, actor, job_id, key)

    async def stop_array(self, actor: Actor, array_id: str, *, key: str | None = None) -> ArrayStop:
        return await arrays.stop_array(
            self.core.records, self.core.link.engine, self.core.sealing, actor, array_id, key
        )

    async def retry_job(self, actor: Actor, job_id: str, *, key: str | None = None) -> Job:
        return await jobs.retry_job(self.core.admission, actor, job_id, key)

    async def set_node_state(
        self, actor: Actor, name: str, state: NodeState, because: str = "", *, key: str | None = None
    ) -> nodes.NodeStateChange:
        return await nodes.set_node_state(self.core.upkeep, actor, name, state, because, key)

    async def remove_node(self, actor: Actor, name: str, *, key: str | None = None) -> None:
        await nodes.remove_node(self.core.records, self.core.link.outages, actor, name, key)

    async def declare_window(self, actor: Actor, request: WindowRequest, *, key: str | None = None) -> Window:
        return await windows.declare_window(self.core.records, actor, request, key)

    async def cancel_window(self, actor: Actor, window_id: str, *, key: str | None = None) -> Window:
        return await windows.cancel_window(self.core.records, actor, window_id, key)

    async def start_drill(self, actor: Actor, request: DrillRequest, *, key: str | None = None) -> Drill:
        return await drills.start_drill(self.core.records, self.core.running, actor, request, key)

    async def create_user(
        self, actor: Actor, name: str, cluster_role: Role | None = None, *, key: str | None = None
    ) -> User:
        return await people.create_user(self.core.records, actor, name, cluster_role, key)

    async def update_user(
        self, actor: Actor, name: str, changes: dict[str, Any], *, key: str | None = None
    ) -> User:
        return await people.update_user(self.core.serving, actor, name, changes, key)

    async def create_project(
        self, actor: Actor, name: str, limits: dict[str, Any], *, key: str | None = None
    ) -> Project:
        return await people.create_project(self.core.records, self.core.settings, actor, name, limits, key)

    async def update_project(
        self, actor: Actor, name: str, limits: dict[str, Any], *, key: str | None = None
    ) -> Project:
        return await people.update_project(self.core.records, actor, name, limits, key)

    async def set_member(
        self, actor: Actor, project: str, user_name: str, role: Role, *, key: str | None = None
    ) -> Membership:
        return await people.set_member(self.core.serving, actor, project, user_name, role, key)

    async def remove_member(
        self, actor: Actor, project: str, user_name: str, *, key: str | None = None
    ) -> None:
        await people.remove_member(self.core.serving, actor, project, user_name, key)

    async def create_token(
        self,
        actor: Actor,
        user: User,
        *,
        label: str,
        scope: Role,
        project: str | None = None,
        service: str | None = None,
        lifetime_s: float | None = None,
        key: str | None = None,
    ) -> tuple[Token, str | None]:
        request = tokens.TokenRequest(
            label=label, scope=scope, project=project, service=service, lifetime_s=lifetime_s
        )
        return await tokens.create_token(self.core.serving, actor, user, request, key)

    async def revoke_token(
        self, actor: Actor, token_id: str, *, keep_children: bool = False, key: str | None = None
    ) -> tuple[TokenRevocation, bool]:
        return await tokens.revoke_token(self.core.serving, actor, token_id, key, keep_children=keep_children)

    async def record_denied(self, actor: Actor, action: str, facts: dict[str, Any]) -> None:
        """Record for the audit that the actor lacked the permission for what it tried."""
        await audit.record_denied(self.core.records, actor, action, facts)

    async def renew(self, renewal: Renewal) -> RenewalReply:
        return await renewals.renew(self.core.upkeep, self.core.inputs, self.core.services, renewal)

    async def assign_task(self, request: TaskSpecRequest) -> TaskAssignment:
        return await mailbox.assign_task(self.core.upkeep, self.core.inputs, self.core.services, request)

    async def archive_for(self, request: TaskSpecRequest) -> str:
        return await mailbox.archive_for(
            self.core.records.store, self.core.link.engine, self.core.leadership, request
        )

    async def receive_status_report(self, report: StatusReport, log_chunk: bytes) -> StatusReply:
        return await mailbox.receive_report(
            self.core.records.store, self.core.link.engine, self.core.leadership, report, log_chunk
        )

    def explain(
        self, job: Job, attempts: Sequence[Attempt], *, has_outlook: bool = False
    ) -> Explanation | None:
        """Explain why the job does not run. `attempts`: all attempts of the job, oldest first. `has_outlook`:
        the outlook, not the hint, says what would start it.
        """
        explanation = explain.explain(
            self.core.records.clock, self.core.running, self.core.planning, self.core.link, job, attempts
        )
        return (
            explain.without_hint(explanation, job) if explanation is not None and has_outlook else explanation
        )
