"""The control plane as the API sees it: commands, answers, and nothing about how the loops run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

from shoal.control import (
    arrays,
    audit,
    desk,
    drills,
    explain,
    jobs,
    nodes,
    outlook,
    people,
    reports,
    submit,
    tokens,
    windows,
)
from shoal.control.actor import Actor
from shoal.control.arrays import Stopped
from shoal.control.audit import Verdict
from shoal.control.core import Core
from shoal.control.drills import AskedDrill
from shoal.control.frozen import Frozen
from shoal.control.opening import open_core
from shoal.control.record import note
from shoal.control.runner import Changed, run_loops
from shoal.control.services import commands as services
from shoal.control.services.commands import AskedService
from shoal.control.submit import Asked, SubmitResult
from shoal.control.tokens import Revoked
from shoal.control.windows import AskedWindow
from shoal.errors import ShoalError
from shoal.model.attempt import Attempt
from shoal.model.drill import Drill
from shoal.model.job import Job
from shoal.model.node import NodeState
from shoal.model.people import Membership, Project, Role, Token, User
from shoal.model.service import Service
from shoal.model.window import Window
from shoal.scheduler import Explanation, Outlook
from shoal.settings import Settings
from shoal.spec import JobSpec
from shoal.wire import Assignment, Dispatch, DispatchAnswer, Fetch, LeftBehind, Renewal, RenewalAnswer


class ControlPlane:
    """Every mutation is one transaction with its event, idempotent by `key`, on disk when it returns."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.changed = Changed()

    @property
    def settings(self) -> Settings:
        return self.core.settings

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: Settings) -> AsyncIterator[ControlPlane]:
        """Open the home, recover what ran, and run the loops for as long as the block lasts."""
        async with open_core(settings) as core, cls.running(core) as plane:
            yield plane

    @classmethod
    @asynccontextmanager
    async def running(cls, core: Core) -> AsyncIterator[ControlPlane]:
        """Run the loops for as long as the block lasts."""
        plane = cls(core)
        async with run_loops(core, plane.changed):
            yield plane

    async def submit(
        self,
        actor: Actor,
        spec: JobSpec | Frozen,
        *,
        project: str,
        owner: User,
        key: str | None = None,
        archive_digest: str | None = None,
        left_behind: LeftBehind | None = None,
        secrets: dict[str, str] | None = None,
        said: bytes | None = None,
        refusal: ShoalError | None = None,
    ) -> SubmitResult:
        """`said`: the request as it came, where it came from outside.

        `refusal`: what the caller found missing, raised unless the key was accepted before.
        """
        asked = Asked(
            spec=spec,
            project=project,
            owner=owner,
            archive_digest=archive_digest,
            left_behind=left_behind,
            secrets=secrets or {},
            said=said,
            refusal=refusal,
        )
        return await submit.submit(self.core, actor, asked, key)

    async def serve(self, actor: Actor, asked: AskedService, *, key: str | None = None) -> Service:
        return await services.serve(self.core, actor, asked, key)

    async def scale_service(
        self, actor: Actor, service_id: str, low: int, high: int, *, key: str | None = None
    ) -> Service:
        return await services.scale(self.core, actor, service_id, low, high, key)

    async def undo_rollout(self, actor: Actor, service_id: str, *, key: str | None = None) -> Service:
        return await services.undo(self.core, actor, service_id, key)

    async def promote_rollout(self, actor: Actor, service_id: str, *, key: str | None = None) -> Service:
        return await services.promote(self.core, actor, service_id, key)

    async def stop_service(self, actor: Actor, service_id: str, *, key: str | None = None) -> Service:
        return await services.stop(self.core, actor, service_id, key)

    async def stop_job(self, actor: Actor, job_id: str, *, key: str | None = None) -> Job:
        return await jobs.stop_job(self.core, actor, job_id, key)

    async def stop_array(self, actor: Actor, array_id: str, *, key: str | None = None) -> Stopped:
        return await arrays.stop_array(self.core, actor, array_id, key)

    async def retry_job(self, actor: Actor, job_id: str, *, key: str | None = None) -> Job:
        return await jobs.retry_job(self.core, actor, job_id, key)

    async def set_node_state(
        self, actor: Actor, name: str, state: NodeState, because: str = "", *, key: str | None = None
    ) -> nodes.Decided:
        decided = await nodes.set_node_state(self.core, actor, name, state, because, key)
        self.changed.wake_healer()
        return decided

    async def remove_node(self, actor: Actor, name: str, *, key: str | None = None) -> None:
        await nodes.remove_node(self.core, actor, name, key)

    async def declare_window(self, actor: Actor, asked: AskedWindow, *, key: str | None = None) -> Window:
        return await windows.declare_window(self.core, actor, asked, key)

    async def cancel_window(self, actor: Actor, window_id: str, *, key: str | None = None) -> Window:
        return await windows.cancel_window(self.core, actor, window_id, key)

    async def start_drill(self, actor: Actor, asked: AskedDrill, *, key: str | None = None) -> Drill:
        return await drills.start_drill(self.core, actor, asked, key)

    async def create_user(
        self, actor: Actor, name: str, cluster_role: Role | None = None, *, key: str | None = None
    ) -> User:
        return await people.create_user(self.core, actor, name, cluster_role, key)

    async def update_user(
        self, actor: Actor, name: str, changes: dict[str, Any], *, key: str | None = None
    ) -> User:
        return await people.update_user(self.core, actor, name, changes, key)

    async def create_project(
        self, actor: Actor, name: str, limits: dict[str, Any], *, key: str | None = None
    ) -> Project:
        return await people.create_project(self.core, actor, name, limits, key)

    async def update_project(
        self, actor: Actor, name: str, limits: dict[str, Any], *, key: str | None = None
    ) -> Project:
        return await people.update_project(self.core, actor, name, limits, key)

    async def set_member(
        self, actor: Actor, project: str, user_name: str, role: Role, *, key: str | None = None
    ) -> Membership:
        return await people.set_member(self.core, actor, project, user_name, role, key)

    async def remove_member(
        self, actor: Actor, project: str, user_name: str, *, key: str | None = None
    ) -> None:
        await people.remove_member(self.core, actor, project, user_name, key)

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
        asked = tokens.AskedToken(
            label=label, scope=scope, project=project, service=service, lifetime_s=lifetime_s
        )
        return await tokens.create_token(self.core, actor, user, asked, key)

    async def revoke_token(
        self, actor: Actor, token_id: str, *, keep_children: bool = False, key: str | None = None
    ) -> tuple[Revoked, bool]:
        return await tokens.revoke_token(self.core, actor, token_id, key, keep_children=keep_children)

    async def record_denied(self, actor: Actor, what: str, facts: dict[str, Any]) -> None:
        """Somebody tried what they may not: the audit keeps it."""
        now = self.core.clock.now()
        data = {"what": what, **facts}
        await self.core.store.write(lambda tx: note(tx, "access.denied", now, actor, data=data))

    async def tell_refusals(self) -> None:
        """Put into the log what was refused and only counted so far."""
        await audit.write_refusals(self.core, is_all=True)

    async def verify_audit(self) -> Verdict:
        """Whether the log is what was written, and the tables of people what the log says."""
        return await audit.verify(self.core)

    async def renew(self, renewal: Renewal) -> RenewalAnswer:
        return await reports.renew(self.core, renewal)

    async def fetch_order(self, asked: Fetch) -> Assignment:
        return await desk.fetch(self.core, asked)

    async def archive_for(self, asked: Fetch) -> str:
        return await desk.archive_for(self.core, asked)

    async def hear_keeper(self, told: Dispatch, piece: bytes) -> DispatchAnswer:
        return await desk.hear(self.core, told, piece)

    def explain(
        self, job: Job, attempts: Sequence[Attempt], *, has_outlook: bool = False
    ) -> Explanation | None:
        """`attempts`: all of the job's, oldest first. `has_outlook`: what would start it is told there."""
        told = explain.explain(self.core, job, attempts)
        return explain.without_guess(told, job) if told is not None and has_outlook else told

    async def look_ahead(self, actor: Actor, attempt_ids: Collection[str]) -> dict[str, Outlook]:
        """When each of them that waits will start. Takes a thread for up to about a quarter of a second."""
        return await outlook.look_ahead(self.core, actor, attempt_ids)

    async def look_ahead_and_around(self, actor: Actor, attempt_id: str) -> Outlook | None:
        """The same for one, with changes that would start it now; None when it does not wait."""
        return await outlook.look_ahead_and_around(self.core, actor, attempt_id)
