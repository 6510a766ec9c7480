"""The Ray engine: starts and observes node agents through the Ray agents; the mailbox does the rest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import anyio

from shoal.clock import Clock
from shoal.engines.ray.client import RayClient
from shoal.engines.ray.config import RayConfig
from shoal.engines.ray.head import finder
from shoal.engines.ray.parse import (
    RayNode,
    is_about,
    parse_nodes,
    restarted_observation,
    task_observation,
    unknown_observation,
)
from shoal.engines.ray.render import agent_task, key_of
from shoal.engines.remote.cluster_observation import ClusterObservation, ClusterObservations
from shoal.engines.remote.connection import ControlPlaneAccess
from shoal.engines.remote.engine import QueryTimes, RemoteEngine
from shoal.engines.remote.mailbox import MailboxTask
from shoal.engines.remote.task_observer import SILENT_S
from shoal.errors import EngineUnreachable, SpecError
from shoal.model.node import NodeFacts
from shoal.wire import LaunchRequest, TaskIdentity, TaskSpec

T = TypeVar("T")
PATIENCE_S = 5.0
"""How long a question waits for a Ray that is not found, as other questions must not wait for it."""
NODES_S = 2.0
"""How old the list of nodes may be."""


class RayEngine(RemoteEngine):
    """One per home. Its agents are in the home's own namespace, so several homes may use one Ray."""

    name = "ray"
    sharing_hint = (
        "`shoal down`, then `shoal connect ray` with the flags that it had and `--shared DIR`, "
        "then `shoal up`"
    )

    def __init__(
        self,
        home: Path,
        *,
        clock: Clock,
        access: ControlPlaneAccess,
        config: RayConfig,
        client: RayClient | None = None,
        term: int = 0,
    ) -> None:
        """Create the engine. The caller closes a `client` that it passes."""
        # Every user of a Ray can read and stop everything in it.
        only_project = None if config.has_shared_trust else config.project
        super().__init__(home, clock=clock, access=access, term=term, only_project=only_project)
        self._config = config
        self._is_own_client = client is None
        self._client = client or RayClient(
            config,
            namespace=namespace_of(access),
            log_file=home / "logs" / "ray-bridge.log",
            find=finder(config, home),
            patience_s=PATIENCE_S,
        )
        self._nodes: dict[str, RayNode] = {}
        self._nodes_at = -NODES_S
        self._nodes_asked = QueryTimes(-NODES_S, -NODES_S)
        self._away_since: dict[str, float] = {}
        """By node: since when Ray has no such node, or no agent replies there. The time during which Ray
        itself could not be asked does not count."""
        self._unasked_since: float | None = None
        """Monotonic time of Ray's last reply, once a later question failed."""
        self._asking = anyio.Lock()

    async def launch(self, launch_request: LaunchRequest, task_specs: tuple[TaskSpec, ...]) -> None:
        await self._refresh()
        starts, failed = [], {}
        for task_spec in task_specs:
            identity = task_spec.identity
            node = self._nodes.get(identity.node)
            key = key_of(identity.attempt_id, identity.node, identity.replacement)
            if node is None:
                failed[key] = f"Ray has no node {identity.node} now"
            else:
                task = agent_task(self._config, launch_request, identity)
                starts.append({"node_id": node.node_id, "key": key, "task": task})
        if starts:
            failed |= (await self._ask(lambda: self._client.start(starts)))["failed"]
        if failed:
            failures = "; ".join(f"{key}: {reason}" for key, reason in sorted(failed.items()))
            raise EngineUnreachable(f"not every node agent was started: {failures}", hint="shoal nodes")

    async def observe_tasks(self, tasks: Collection[MailboxTask]) -> ClusterObservations:
        await self._refresh()
        nodes, nodes_asked = self._nodes, self._nodes_asked  # another caller may refresh them while we wait
        keys: dict[str, list[str]] = {}
        for task in tasks:
            node = nodes.get(task.identity.node)
            if node is not None:
                keys.setdefault(node.node_id, []).append(_key(task.identity))
        answers = await self._ask(lambda: self._client.look(keys)) if keys else {}
        observations: ClusterObservations = {}
        for task in tasks:
            identity = task.identity
            node = nodes.get(identity.node)
            if node is None:
                observations[task.key] = self._observe_unreachable(
                    identity.node, f"Ray has no node {identity.node} now"
                )
                continue
            if node.node_id in answers["failed"]:
                reason = f"{identity.node}: {answers['failed'][node.node_id]}"
                observations[task.key] = self._observe_unreachable(identity.node, reason)
                continue
            rebooted = await self.has_rebooted(task, node.boot, nodes_asked)
            report = answers["seen"][node.node_id].get(_key(identity))
            assigned = "" if task.assignment is None else task.assignment.process
            # An agent with the assigned process's record has looked, and knows by it in which boot that
            # began.
            if rebooted and not (report and is_about(report, assigned)):
                observations[task.key] = restarted_observation(identity.node)
            elif report:
                observations[task.key] = task_observation(identity.node, report, assigned)
        return observations

    def _observe_unreachable(self, node: str, raw: str) -> ClusterObservation:
        """Return the observation of a task on a node that cannot be asked. After a while it may be placed
        elsewhere.
        """
        now = self._clock.monotonic()
        away_s = now - self._away_since.setdefault(node, now)
        return unknown_observation(
            raw, f"`{node}` did not answer for {away_s:.0f} s" if away_s >= SILENT_S else ""
        )

    async def cancel_launched(self, attempt_id: str) -> None:
        await self._refresh()
        keys: dict[str, list[str]] = {}
        for task in self.mailbox.find(attempt_id).values():
            node = self._nodes.get(task.identity.node)
            if node is not None:
                keys.setdefault(node.node_id, []).append(_key(task.identity))
        if keys:
            await self._ask(lambda: self._client.end(keys))

    async def nodes(self) -> list[NodeFacts]:
        await self._refresh()
        return self.observer.mark_silent_nodes([node.facts for node in self._nodes.values()])

    async def close(self) -> None:
        await super().close()
        if self._is_own_client:
            await self.on_thread(self._client.close)

    async def _refresh(self) -> None:
        async with self._asking:
            if self._clock.monotonic() - self._nodes_at >= NODES_S:
                asked_at = self._clock.monotonic()
                reply: dict[str, Any] = await self._ask(self._client.nodes)
                self._nodes = {node.facts.name: node for node in parse_nodes(reply)}
                self._nodes_at = self._clock.monotonic()
                self._nodes_asked = QueryTimes(asked_at, self._nodes_at)
                self._count_away(self._nodes_at)

    def _count_away(self, now: float) -> None:
        """Update the times of nodes that do not reply.

        While Ray itself could not be asked, no node was observed away. Times that were counted before stay,
        because the bridge starts again every few seconds if an agent is gone.
        """
        unasked_s = 0.0 if self._unasked_since is None else now - self._unasked_since
        self._unasked_since = None
        answering = {name for name, node in self._nodes.items() if node.facts.is_alive}
        away = {name: at for name, at in self._away_since.items() if name not in answering}
        self._away_since = {name: min(at + unasked_s, now) for name, at in away.items()}

    async def _ask(self, work: Callable[[], T]) -> T:
        """Ask Ray. A configuration that fails now was right once, so any failure means that nothing is
        known.
        """
        try:
            return await self.on_thread(work)
        except (EngineUnreachable, SpecError) as error:
            if self._unasked_since is None:
                self._unasked_since = self._nodes_at
            if isinstance(error, EngineUnreachable):
                raise
            raise EngineUnreachable(error.message, hint=error.hint) from error


def namespace_of(access: ControlPlaneAccess) -> str:
    """Return the home's own namespace, by its authority, which no other home has."""
    return f"shoal-{hashlib.sha256(access.ca.encode()).hexdigest()[:12]}"


def _key(identity: TaskIdentity) -> str:
    return key_of(identity.attempt_id, identity.node, identity.replacement)
