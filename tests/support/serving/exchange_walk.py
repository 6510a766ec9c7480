"""Every path of an exchange, between a recorded caller, a real service and recorded replicas.

The walk starts from several situations. In each it applies every event to every condition that it has
reached. It repeats the path to a condition instead of copying an exchange.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shoal.serving.admission.accounts import CallerAccount, HeldBytes
from shoal.serving.admission.routes import ServiceRoutes
from shoal.serving.balance.balancer import NO_HINTS
from shoal.serving.balance.replica import LiveReplica, ReleaseTally
from shoal.serving.balance.service import LiveService
from shoal.serving.balance.slot import Slot
from shoal.serving.exchange.exchange import Exchange
from shoal.serving.exchange.states import ExchangeEvent, ExchangeState
from shoal.serving.exchange.table import TABLE
from shoal.serving.proxy.local_reply import ProxyRefusal
from shoal.serving.proxy.reply import parse_reply
from shoal.serving.proxy.upstream import ConnectionSeeker, Upstream
from shoal.serving.table import ReplicaConfig
from tests.support.serving.data_plane_lab import request_bytes, service
from tests.support.serving.framing import RecordingTransport

LATE_S = 1e12
"""Added to the time of an event: every limit has passed."""
MAX_PATH = 12


class RecordingClient:
    """A caller's connection without a socket."""

    forwarded = b""

    def __init__(self) -> None:
        self.due = 0.0
        self.held = HeldBytes(1 << 20)
        self.is_last = False
        self.is_stalled = False
        self.exchange: Exchange | None = None
        self.ends: list[str] = []
        """How the connection was told that the request is over."""
        self.sought: list[tuple[LiveReplica, ConnectionSeeker]] = []

    def write(self, data: bytes) -> None: ...

    def finish(self) -> None:
        self.ends.append("finish")

    def refuse(self, refused: ProxyRefusal, exchange: Exchange) -> None:
        self.ends.append("refuse")

    def abort(self) -> None:
        self.ends.append("abort")

    def switch(self) -> None: ...

    def hold(self) -> None: ...

    def resume(self) -> None: ...

    def pause_writing(self) -> None:
        assert self.exchange is not None
        self.exchange.on_caller_stalled()

    def open(self, replica: LiveReplica, seeker: ConnectionSeeker) -> None:
        self.sought.append((replica, seeker))


@dataclass(frozen=True)
class Situation:
    """What a walk starts from."""

    title: str
    raw: bytes
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
    num_replicas: int = 2
    has_idle: bool = False
    """The replicas have idle connections."""
    num_connects: int = 0
    """How many connections have failed already."""
    has_rival: bool = False
    """Another request waits for a slot from the moment that this one is sent."""


KEY = "idempotency-key: 7"
UPGRADE = ("connection: upgrade", "upgrade: websocket")
POST = request_bytes(method="POST", body=b"body")
CHUNKED = request_bytes("/p/s/", "transfer-encoding: chunked").replace(b"GET", b"POST")
SITUATIONS = (
    Situation("a GET", request_bytes()),
    Situation("a GET on an idle connection", request_bytes(), has_idle=True),
    Situation("a GET that is hedged", request_bytes(), {"hedge_s": 60.0}),
    Situation("a GET after many failed connections", request_bytes(), num_connects=6),
    Situation("a GET to a full service", request_bytes(), {"cap": 1}, 1, has_rival=True),
    Situation("a GET to a service that is off", request_bytes(), {"is_off": True}, 0),
    Situation("a GET without a replica", request_bytes(), {"start_s": 600.0}, 0, has_idle=True),
    Situation("a POST", POST),
    Situation("a POST without a replica", POST, {"queue_bytes": 2060}, 0, has_idle=True),
    Situation("a conversation in chunks", CHUNKED),
    Situation("a conversation in chunks on an idle connection", CHUNKED, has_idle=True),
    Situation("a POST in chunks that may be repeated", CHUNKED, {"is_repeatable": True}, has_idle=True),
    Situation("a websocket", request_bytes("/p/s/", *UPGRADE), has_idle=True),
)


class Rival:
    """Another request that waits for a slot."""

    hints = NO_HINTS
    weight_bytes = 1

    def __init__(self) -> None:
        self.account = CallerAccount("rival")

    def bind(self, replica: LiveReplica) -> None:
        Slot(replica, self.account)

    def refuse(self, refused: ProxyRefusal) -> None: ...


def new_replica() -> LiveReplica:
    config = ReplicaConfig(replica_id="new", address="127.0.0.1:2", release=1)
    return LiveReplica(config, ReleaseTally(1), cap=9)


class Step(NamedTuple):
    """One event with what it brings."""

    event: ExchangeEvent
    title: str
    apply: Callable[[Walker], object]


class Move(NamedTuple):
    state: ExchangeState
    event: ExchangeEvent
    next_state: ExchangeState


class Walker:
    """One exchange on its way, from the beginning of a situation."""

    def __init__(self, situation: Situation) -> None:
        names = [f"r{number}" for number in range(situation.num_replicas)]
        configs = [ReplicaConfig(replica_id=name, address="127.0.0.1:1", release=1) for name in names]
        self.situation = situation
        self.num_rivals = 0
        self.service = LiveService(service(*configs, **situation.settings))
        self.client = RecordingClient()
        self.sent: list[RecordingTransport] = []
        if situation.has_idle:
            for replica in self.service.replicas.values():
                replica.idle.append(self.connection(replica))
        head, _, self.rest = situation.raw.partition(b"\r\n\r\n")
        routes = ServiceRoutes({("p", "s"): self.service}, 0.0)
        entry, query, _, own_headers, length = routes.resolve(head + b"\r\n\r\n")
        account = entry.account or self.service.account("caller")
        assert self.service.admit(account, 0.0) is None or situation.settings.get("is_off")
        account.admitted = 1
        request = (entry, query, b"id", own_headers, length)
        self.exchange = Exchange(self.client, request, account, 0.0)
        self.exchange.num_connects = situation.num_connects
        self.client.exchange = self.exchange

    def connection(self, replica: LiveReplica) -> Upstream:
        up = Upstream(replica)
        up.connection_made(transport := RecordingTransport())
        self.sent.append(transport)
        return up

    def connect(self) -> None:
        replica, seeker = self.client.sought.pop()
        seeker.on_connected(self.connection(replica))
        if self.situation.has_rival and not self.num_rivals:
            self.num_rivals = 1
            self.service.wait(Rival())

    def fail_to_connect(self, *, is_local: bool) -> None:
        replica, seeker = self.client.sought.pop()
        seeker.on_refused(replica, is_local=is_local)

    def reply(self, raw: bytes) -> None:
        self.exchange.on_reply(parse_reply(raw), b"")

    def stall(self, *, is_stalled: bool) -> None:
        self.client.is_stalled = is_stalled
        (self.exchange.on_caller_stalled if is_stalled else self.exchange.on_caller_resumed)()

    def free_slot(self) -> None:
        """A replica comes."""
        replica = new_replica()
        if self.situation.has_idle:
            replica.idle.append(self.connection(replica))
        self.service.replicas["new"] = replica
        self.service.refresh(0.0)

    def win_hedge(self) -> None:
        hedge = self.exchange.hedge
        assert hedge is not None
        hedge._begin()
        if hedge._up is None:
            self.connect()
        assert hedge._slot is not None
        assert hedge._up is not None
        hedge._move(hedge._slot, hedge._up)

    def condition(self) -> tuple[object, ...]:
        """Return all that decides what the next event does."""
        made, body, relay = self.exchange, self.exchange.body, self.exchange.relay
        return (
            *(made.state, made.how_ended, made.up is None, made.hedge is None, made.num_repeats),
            *(made.slot is None, made.num_connects > 6),
            *(body.is_whole, body.is_callers_turn, body.kept is None, body.is_held),
            *(relay.reply is None, relay.events is None, relay.rewriter is None, relay.has_moved),
            *(self.client.is_stalled, len(self.client.sought), len(self.service.open)),
        )

    @property
    def is_hedged(self) -> bool:
        hedge = self.exchange.hedge
        return hedge is not None and hedge._slot is None and self.exchange.state is ExchangeState.AWAITING

    def can(self, step: Step) -> bool:
        """Return whether the event can come now: the table has it, and its sender is there."""
        state = self.exchange.state
        if TABLE[state, step.event] is None:
            return False
        if step.event is ExchangeEvent.REQUEST_WHOLE:
            return self.exchange.body.length >= 0
        if step.event is ExchangeEvent.BODY_FOLLOWS:
            return self.exchange.body.length != 0
        if step.event in {ExchangeEvent.CONNECTED, ExchangeEvent.UNREACHABLE}:
            return bool(self.client.sought)
        if step.event is ExchangeEvent.SLOT_FREE:
            return "new" not in self.service.replicas
        if step.event is ExchangeEvent.HEDGE_WON:
            return self.is_hedged and len(self.service.open) > 1
        if step.event in {ExchangeEvent.BODY_DATA, ExchangeEvent.BODY_END}:
            return not self.exchange.is_whole and self.exchange.body.length != 0
        if step.title == "101":
            return self.exchange.is_upgrade
        return True


def _reply(*lines: bytes) -> Callable[[Walker], object]:
    return lambda walker: walker.reply(b"\r\n".join(lines) + b"\r\n\r\n")


GONE_TOKEN = ProxyRefusal(401, "unauthenticated", "the token is no longer valid")
STEPS = (
    Step(ExchangeEvent.REQUEST_WHOLE, "whole", lambda walker: walker.exchange.on_request(walker.rest)),
    Step(ExchangeEvent.BODY_FOLLOWS, "head", lambda walker: walker.exchange.on_body_follows()),
    Step(ExchangeEvent.BODY_DATA, "little", lambda walker: walker.exchange.on_body(b"4\r\nbody\r\n")),
    Step(ExchangeEvent.BODY_DATA, "much", lambda walker: walker.exchange.on_body(b"x" * 200_000)),
    Step(ExchangeEvent.BODY_DATA, "too much", lambda walker: walker.exchange.on_body(b"x" * (2 << 20))),
    Step(ExchangeEvent.BODY_END, "end", lambda walker: walker.exchange.on_body_end()),
    Step(ExchangeEvent.TUNNEL_DATA, "data", lambda walker: walker.exchange.on_tunnel_data(b"x")),
    Step(ExchangeEvent.CALLER_STALLED, "", lambda walker: walker.stall(is_stalled=True)),
    Step(ExchangeEvent.CALLER_RESUMED, "", lambda walker: walker.stall(is_stalled=False)),
    Step(ExchangeEvent.CALLER_GONE, "", lambda walker: walker.exchange.on_gone()),
    Step(ExchangeEvent.DEADLINE, "early", lambda walker: walker.exchange.expire(0.0)),
    Step(ExchangeEvent.DEADLINE, "late", lambda walker: walker.exchange.expire(LATE_S)),
    Step(ExchangeEvent.REFUSED, "", lambda walker: walker.exchange.refuse(GONE_TOKEN)),
    Step(ExchangeEvent.SLOT_FREE, "", lambda walker: walker.free_slot()),
    Step(ExchangeEvent.CONNECTED, "", lambda walker: walker.connect()),
    Step(ExchangeEvent.UNREACHABLE, "there", lambda walker: walker.fail_to_connect(is_local=False)),
    Step(ExchangeEvent.UNREACHABLE, "here", lambda walker: walker.fail_to_connect(is_local=True)),
    Step(ExchangeEvent.REPLICA_STALLED, "", lambda walker: walker.exchange.on_stalled()),
    Step(ExchangeEvent.REPLICA_RESUMED, "", lambda walker: walker.exchange.on_resumed()),
    Step(ExchangeEvent.HEDGE_WON, "", lambda walker: walker.win_hedge()),
    Step(ExchangeEvent.REPLY_HEAD, "200", _reply(b"HTTP/1.1 200 OK", b"content-length: 9")),
    Step(ExchangeEvent.REPLY_HEAD, "503", _reply(b"HTTP/1.1 503 No", b"transfer-encoding: chunked")),
    Step(ExchangeEvent.REPLY_HEAD, "events", _reply(b"HTTP/1.1 200 OK", b"content-type: text/event-stream")),
    Step(
        ExchangeEvent.REPLY_HEAD,
        "101",
        _reply(b"HTTP/1.1 101 Switching", b"connection: upgrade", b"upgrade: websocket"),
    ),
    Step(ExchangeEvent.REPLY_DATA, "", lambda walker: walker.exchange.on_data(b"x")),
    Step(ExchangeEvent.REPLY_END, "", lambda walker: walker.exchange.on_end()),
    Step(ExchangeEvent.REPLICA_LOST, "", lambda walker: walker.exchange.on_lost("gone")),
)


class Visit(NamedTuple):
    """An exchange after the last event of a path."""

    path: tuple[Step, ...]
    state_before: ExchangeState
    walker: Walker
    is_new: bool
    """No path before has led to this condition."""


def walk(situation: Situation) -> Iterator[Visit]:
    """Try every event in every condition that can be reached. Needs a running loop."""
    seen: set[tuple[object, ...]] = set()
    paths: list[tuple[Step, ...]] = [()]
    for path in paths:
        for step in STEPS:
            walker = follow(situation, path)
            state_before = walker.exchange.state
            if not walker.can(step):
                continue
            step.apply(walker)
            condition = walker.condition()
            is_new = condition not in seen
            yield Visit((*path, step), state_before, walker, is_new)
            if is_new and len(path) < MAX_PATH:
                seen.add(condition)
                paths.append((*path, step))


def follow(situation: Situation, path: tuple[Step, ...]) -> Walker:
    walker = Walker(situation)
    for step in path:
        step.apply(walker)
    return walker


def all_moves() -> list[Move]:
    """Return every change of state that an event can cause, in the table's order."""

    async def explore() -> set[Move]:
        return {
            Move(visit.state_before, visit.path[-1].event, visit.walker.exchange.state)
            for situation in SITUATIONS
            for visit in walk(situation)
        }

    order = {key: place for place, key in enumerate(TABLE)}
    states = list(ExchangeState)
    moves = asyncio.run(explore())
    return sorted(moves, key=lambda move: (order[move.state, move.event], states.index(move.next_state)))
