"""The Ray engine: keepers by agent actors, everything else at the desk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import anyio

from shoal.clock import Clock
from shoal.engines.desk import DeskShare
from shoal.engines.glimpses import Glimpse, Glimpses
from shoal.engines.ray.client import RayClient
from shoal.engines.ray.config import RayConfig
from shoal.engines.ray.head import finder
from shoal.engines.ray.parse import RayNode, parse_nodes
from shoal.engines.ray.render import keeper_task, key_of
from shoal.engines.ray.states import glimpse, is_about, restarted, unseen
from shoal.engines.reach import Reach
from shoal.engines.remote import Asked, RemoteEngine
from shoal.engines.sightings import SILENT_S
from shoal.errors import EngineUnreachable, SpecError
from shoal.model.node import NodeFacts
from shoal.wire import Order, Summons

T = TypeVar("T")
PATIENCE_S = 5.0
"""How long a question waits for a Ray that is not found: nobody else may wait for it."""
NODES_S = 2.0
"""How old an answer about nodes may be."""


class RayEngine(RemoteEngine):
    """One per home. Its agents are in a namespace of the home's: several homes may use one Ray."""

    name = "ray"
    to_share = (
        "`shoal down`, then `shoal connect ray` with the flags that it had and `--shared DIR`, "
        "then `shoal up`"
    )

    def __init__(
        self,
        home: Path,
        *,
        clock: Clock,
        reach: Reach,
        config: RayConfig,
        client: RayClient | None = None,
        term: int = 0,
    ) -> None:
        """`client`: somebody else's, who closes it."""
        # Everybody in a Ray can read and stop everything in it.
        only_project = None if config.has_shared_trust else config.project
        super().__init__(home, clock=clock, reach=reach, term=term, only_project=only_project)
        self._config = config
        self._is_own_client = client is None
        self._client = client or RayClient(
            config,
            namespace=namespace_of(reach),
            log_file=home / "logs" / "ray-bridge.log",
            find=finder(config, home),
            patience_s=PATIENCE_S,
        )
        self._nodes: dict[str, RayNode] = {}
        self._nodes_at = -NODES_S
        self._nodes_asked = Asked(-NODES_S, -NODES_S)
        self._away_since: dict[str, float] = {}
        """By node: since when Ray has no such node, or no agent answers there; later by as long as Ray itself
        could not be asked since."""
        self._unasked_since: float | None = None
        """Monotonic: Ray's last answer, once a question after it was in vain."""
        self._asking = anyio.Lock()

    async def start(self, summons: Summons, orders: tuple[Order, ...]) -> None:
        await self._refresh()
        starts, failed = [], {}
        for order in orders:
            node = self._nodes.get(order.node)
            key = key_of(order.attempt_id, order.node, order.incarnation)
            if node is None:
                failed[key] = f"Ray has no node {order.node} now"
            else:
                task = keeper_task(self._config, summons, order)
                starts.append({"node_id": node.node_id, "key": key, "task": task})
        if starts:
            failed |= (await self._ask(lambda: self._client.start(starts)))["failed"]
        if failed:
            told = "; ".join(f"{key}: {said}" for key, said in sorted(failed.items()))
            raise EngineUnreachable(f"not every keeper was started: {told}", hint="shoal nodes")

    async def look(self, shares: Collection[DeskShare]) -> Glimpses:
        await self._refresh()
        nodes, nodes_asked = self._nodes, self._nodes_asked  # another may ask anew while we wait
        asked: dict[str, list[str]] = {}
        for share in shares:
            node = nodes.get(share.order.node)
            if node is not None:
                asked.setdefault(node.node_id, []).append(_key(share.order))
        answers = await self._ask(lambda: self._client.look(asked)) if asked else {}
        found: Glimpses = {}
        for share in shares:
            order = share.order
            node = nodes.get(order.node)
            if node is None:
                found[order.attempt_id, order.node] = self._away(
                    order.node, f"Ray has no node {order.node} now"
                )
                continue
            if node.node_id in answers["failed"]:
                because = f"{order.node}: {answers['failed'][node.node_id]}"
                found[order.attempt_id, order.node] = self._away(order.node, because)
                continue
            rebooted = await self.has_rebooted(share, node.boot, nodes_asked)
            told = answers["seen"][node.node_id].get(_key(order))
            holder = "" if share.taken is None else share.taken.process
            # An agent that has the holder's record has looked, and knows by it in which boot that began.
            if rebooted and not (told and is_about(told, holder)):
                found[order.attempt_id, order.node] = restarted(order.node)
            elif told:
                found[order.attempt_id, order.node] = glimpse(order.node, told, holder)
        return found

    def _away(self, node: str, told: str) -> Glimpse:
        """Of a share on a node that cannot be asked: after a while it is better off elsewhere."""
        now = self._clock.monotonic()
        away_s = now - self._away_since.setdefault(node, now)
        return unseen(told, f"`{node}` did not answer for {away_s:.0f} s" if away_s >= SILENT_S else "")

    async def end(self, attempt_id: str) -> None:
        await self._refresh()
        asked: dict[str, list[str]] = {}
        for share in self.desk.find(attempt_id).values():
            node = self._nodes.get(share.order.node)
            if node is not None:
                asked.setdefault(node.node_id, []).append(_key(share.order))
        if asked:
            await self._ask(lambda: self._client.end(asked))

    async def nodes(self) -> list[NodeFacts]:
        await self._refresh()
        return self.sightings.reached([node.facts for node in self._nodes.values()])

    async def close(self) -> None:
        await super().close()
        if self._is_own_client:
            await self.on_thread(self._client.close)

    async def _refresh(self) -> None:
        async with self._asking:
            if self._clock.monotonic() - self._nodes_at >= NODES_S:
                asked_at = self._clock.monotonic()
                told: dict[str, Any] = await self._ask(self._client.nodes)
                self._nodes = {node.facts.name: node for node in parse_nodes(told)}
                self._nodes_at = self._clock.monotonic()
                self._nodes_asked = Asked(asked_at, self._nodes_at)
                self._count_away(self._nodes_at)

    def _count_away(self, now: float) -> None:
        """Of nodes that do not answer yet. While Ray itself could not be asked none of them was seen away;
        what was counted before stands, as one whose agent is gone has the bridge begin anew every few
        seconds.
        """
        unasked_s = 0.0 if self._unasked_since is None else now - self._unasked_since
        self._unasked_since = None
        answering = {name for name, node in self._nodes.items() if node.facts.is_alive}
        away = {name: at for name, at in self._away_since.items() if name not in answering}
        self._away_since = {name: min(at + unasked_s, now) for name, at in away.items()}

    async def _ask(self, work: Callable[[], T]) -> T:
        """What keeps us from asking now was right once: whatever it is, nothing is known of what runs."""
        try:
            return await self.on_thread(work)
        except (EngineUnreachable, SpecError) as error:
            if self._unasked_since is None:
                self._unasked_since = self._nodes_at
            if isinstance(error, EngineUnreachable):
                raise
            raise EngineUnreachable(error.message, hint=error.hint) from error


def namespace_of(reach: Reach) -> str:
    """The home's own: by its authority, which nobody else has."""
    return f"shoal-{hashlib.sha256(reach.ca.encode()).hexdigest()[:12]}"


def _key(order: Order) -> str:
    return key_of(order.attempt_id, order.node, order.incarnation)
