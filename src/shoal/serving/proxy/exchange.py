"""One request from its head to the end of its reply: wait for a replica, send, relay, and retry where safe.

Everything that was counted for the request is given back exactly once, whichever way it ends.
"""

from __future__ import annotations

from bisect import bisect_left
from time import monotonic
from typing import Protocol

from shoal.serving.admission.accounts import CallerAccount, HeldBytes
from shoal.serving.admission.routes import RoutedRequest
from shoal.serving.balance.balancer import NO_HINTS, RoutingHints, routing_hints
from shoal.serving.balance.hedge import GATEWAY_ERRORS, Hedge
from shoal.serving.balance.replica import LiveReplica, ReleaseTally
from shoal.serving.proxy.chunks import LAST_CHUNK
from shoal.serving.proxy.local_reply import ProxyRefusal, problem_document
from shoal.serving.proxy.reply import (
    HEARTBEAT_S,
    UNTIL_CLOSE,
    WANTS_STREAM,
    ProxyReply,
    ReplyRewriter,
    WarmingStream,
)
from shoal.serving.proxy.request_head import CHUNKED
from shoal.serving.proxy.upstream import ConnectionSeeker, Upstream
from shoal.serving.table import BOUNDS_S

MAX_CONNECTS = 5
"""Connection attempts for one request, besides one for each replica. No attempt has begun anything, and all
replicas of a lost node may have to be tried before one elsewhere."""
OVERHEAD_BYTES = 2048
"""Memory of a waiting request besides its body."""
AHEAD_BYTES = 64 << 10
"""Bytes of a body that are read beyond `hold_bytes` while there is no replica to send them to."""
FOREVER = float("inf")


class ExchangeClient(Protocol):
    """The connection on which the request came."""

    due: float
    forwarded: bytes
    """Headers about the caller, for the replica, up to the request's id."""
    held: HeldBytes
    is_last: bool
    """No more requests are taken from this connection."""
    is_stalled: bool
    """The caller does not read what is ready for it."""

    def write(self, data: bytes) -> None: ...

    def finish(self) -> None:
        """The reply is over."""
        ...

    def refuse(self, refused: ProxyRefusal, exchange: Exchange) -> None:
        """Write a whole reply of the data plane itself."""
        ...

    def switch(self) -> None:
        """The replica has agreed to another protocol. From now on `send_through_tunnel` takes the data."""
        ...

    def abort(self) -> None: ...

    def hold(self) -> None: ...

    def resume(self) -> None: ...

    def pause_writing(self) -> None: ...

    def open(self, replica: LiveReplica, seeker: ConnectionSeeker) -> None:
        """Connect, then call `on_connected` or `on_refused`."""
        ...


class Exchange:
    __slots__ = (
        "_connects",
        "_counts",
        "_has_moved",
        "_hedge",
        "_held",
        "_is_bound",
        "_is_over",
        "_is_replica_stalled",
        "_is_waiting",
        "_num_held_bytes",
        "_prefill",
        "_replay",
        "_reply",
        "_rewriter",
        "_tries",
        "_waits_since",
        "_waits_until",
        "account",
        "began",
        "client",
        "entry",
        "hints",
        "is_answered",
        "is_head",
        "is_tunnel",
        "is_upgrade",
        "is_whole",
        "length",
        "own_headers",
        "query",
        "replica",
        "request_id",
        "up",
        "weight_bytes",
    )

    def __init__(
        self, client: ExchangeClient, request: RoutedRequest, account: CallerAccount, now: float
    ) -> None:
        """`request` has an id."""
        self.client = client
        self.entry, self.query, self.request_id, self.own_headers, self.length = request
        entry = self.entry
        self.account = account
        self.began = now
        self.hints: RoutingHints = NO_HINTS
        self.is_head = entry.is_head
        self.is_upgrade = entry.is_websocket
        self.is_tunnel = False
        """The replica has agreed to the upgrade. Before that, no byte from the caller goes to the replica."""
        self.is_whole = False
        self.replica: LiveReplica | None = None
        self.up: Upstream | None = None
        self.weight_bytes = OVERHEAD_BYTES
        self._held: list[bytes] = []
        self._replay: bytes | None = None
        self._num_held_bytes = 0
        """Bytes of the body that count as held."""
        self._reply: ProxyReply | None = None
        self._counts: ReleaseTally | None = None
        """The counters of the release that streams events to this caller."""
        self._rewriter: ReplyRewriter | None = None
        self._hedge: Hedge | None = None
        self._connects = 0
        self._tries = 0
        self._prefill = 0
        self._waits_since = self._waits_until = FOREVER
        self._is_bound = False
        self._is_waiting = False
        self._is_replica_stalled = False
        """The replica does not read the body."""
        self.is_answered = False
        self._is_over = False
        self._has_moved = False

    # From the caller.

    def on_whole(self, body: bytes) -> None:
        """Take the whole request, which came at once."""
        self.is_whole = True
        if body:
            if not self._hold_bytes(len(body)):
                return
            self._held = [body]
            self.weight_bytes += len(body)
        self.seek()

    def on_body(self, data: bytes) -> None:
        """Take a piece of the body as it is framed."""
        if self._is_over:
            return
        if self.up is not None:
            self.up.transport.write(data)
            return
        if not self._hold_bytes(len(data)):
            return
        self._held.append(data)
        if self._is_waiting:
            service = self.entry.service
            if not service.waiting.grow(self, len(data), max_bytes=service.spec.queue_bytes):
                self.refuse(
                    ProxyRefusal(503, "service.busy", "too many bytes wait for this service", retry_s=2.0)
                )
                return
        else:
            self.weight_bytes += len(data)
        has_enough = self.weight_bytes - OVERHEAD_BYTES > self.entry.hold_bytes
        if has_enough and not self._is_bound and not self._is_waiting:
            self.seek()
        if self._held and self.weight_bytes - OVERHEAD_BYTES > self.entry.hold_bytes + AHEAD_BYTES:
            self.client.hold()

    def on_body_end(self) -> None:
        if self.length == CHUNKED:
            self.on_body(LAST_CHUNK)
        self.is_whole = True
        if self._is_over or self.is_answered or self._is_waiting:
            return
        if self._is_bound:
            self.client.due = monotonic() + self.entry.service.timeout_s
        else:
            self.seek()

    def _hold_bytes(self, num_bytes: int) -> bool:
        """Count bytes as held by the process. If it holds too much, refuse the request and return False."""
        held = self.client.held
        if held.bytes + num_bytes > held.max_bytes:
            self.refuse(ProxyRefusal(503, "plane.full", "too many requests are held here", retry_s=2.0))
            return False
        held.bytes += num_bytes
        self._num_held_bytes += num_bytes
        return True

    def _release_bytes(self) -> None:
        self.client.held.bytes -= self._num_held_bytes
        self._num_held_bytes = 0

    def send_through_tunnel(self, data: bytes) -> None:
        """Send bytes through the tunnel."""
        self._has_moved = True
        if self.up is not None:
            self.up.transport.write(data)

    def on_gone(self) -> None:
        """The caller is gone, so end without a reply."""
        if not self._is_over:
            self._end(is_error=False)

    def expire(self, now: float) -> None:
        """Act on a deadline that has passed."""
        spec = self.entry.service.spec
        if self._is_waiting:
            if now < self._deadline():
                self._send_heartbeat()
                self.client.due = min(self._waits_until, now + HEARTBEAT_S)
                return
            self.refuse(self._queue_timeout(now - self._waits_since))
        elif self.is_answered and (self._has_moved or not (self.is_whole or self._is_replica_stalled)):
            self._has_moved = False
            self.client.due = now + spec.timeout_s
        elif self.is_tunnel or self._counts is not None:
            # A silent tunnel or event stream is no failure of the replica. Otherwise a caller could have a
            # replica ejected by opening quiet streams.
            self._end(is_error=False)
            self.client.abort()
        else:
            self._count_failure(now)
            self.refuse(
                ProxyRefusal(504, "replica.late", f"the replica did not answer for {spec.timeout_s:g} s")
            )

    @property
    def is_events(self) -> bool:
        """Whether the reply is an event stream, which may be silent for any time."""
        return self._counts is not None

    @property
    def has_begun(self) -> bool:
        """Whether any part of a reply is on its way to the caller."""
        return self.is_answered or self._rewriter is not None

    def refuse(self, refused: ProxyRefusal) -> None:
        """End with a reply of the data plane itself, or cut off a reply that has begun."""
        if self._is_over:
            return
        self._end(is_error=refused.status >= 500)
        refused.headers = self.entry.cors
        if self.is_answered:
            self.client.abort()
        elif isinstance(self._rewriter, WarmingStream):
            self.client.write(self._rewriter.error_event(problem_document(refused, self.request_id.decode())))
            self.client.finish()
        else:
            self.client.refuse(refused, self)

    def _send_heartbeat(self) -> None:
        """Show a caller that waits for a stream that it will come. Only while no replica exists: a queue is
        short.
        """
        if self._rewriter is None:
            is_stream = self.is_whole and WANTS_STREAM.search(b"".join(self._held)) is not None
            if not is_stream or self.entry.is_http10 or self.entry.service.open:
                return
            self._rewriter = WarmingStream()
            self.client.write(self._rewriter.begin(self.request_id + self.entry.cors))
        if isinstance(self._rewriter, WarmingStream):
            self.client.write(self._rewriter.heartbeat())

    # To a replica.

    def seek(self, avoid: LiveReplica | None = None) -> None:
        """Bind to a replica now, or as soon as one has a slot."""
        entry = self.entry
        service = entry.service
        if entry.is_asking and self.hints is NO_HINTS:
            self.hints = routing_hints(entry.affinity, b"".join(self._held) if entry.has_prompt else b"")
        replica = None if service.waiting.count else service.pick(self.hints, avoid)
        if replica is not None:
            self.bind(replica)
            return
        now = monotonic()
        self._is_waiting = True
        self._waits_since = now
        self._waits_until = now + service.spec.queue_s
        self.client.due = min(self._deadline(), now + HEARTBEAT_S)
        service.wait(self)

    def _queue_timeout(self, waited_s: float) -> ProxyRefusal:
        service = self.entry.service
        if service.spec.is_failing and not service.open:
            detail = f"no replica was ready for {waited_s:.0f} s: every replica that started has ended"
            return ProxyRefusal(503, "service.failing", detail, retry_s=30.0)
        detail = f"no replica had a free slot for {waited_s:.0f} s"
        return ProxyRefusal(503, "service.busy", detail, retry_s=5.0)

    def _deadline(self) -> float:
        """The end of the wait: later while there is no replica, and still so when one has come."""
        service = self.entry.service
        if not service.open and service.spec.is_failing:
            return self._waits_since + service.spec.queue_s
        if not service.open:
            self._waits_until = max(self._waits_until, self._waits_since + service.spec.start_s)
        return self._waits_until

    def bind(self, replica: LiveReplica) -> None:
        service = self.entry.service
        self._is_waiting = False
        self._is_bound = True
        self.replica = replica
        replica.outstanding += 1
        replica.tally.in_flight += 1
        self.account.bound += 1
        self._prefill = service.balancer.bound(replica, self.hints)
        # A replica's time starts at the request's last byte, so a slow caller cannot make it late.
        self.client.due = monotonic() + service.timeout_s if self.is_whole else FOREVER
        if replica.idle:
            self._send(replica.idle.pop())
        else:
            self._connects += 1
            self.client.open(replica, self)

    def on_connected(self, up: Upstream) -> None:
        if self._is_over or self.replica is not up.replica:
            up.close()
        else:
            self._send(up)

    def on_refused(self, replica: LiveReplica, *, is_local: bool = False) -> None:
        """Try another replica, because this one could not be reached. Nothing has begun."""
        if self._is_over or self.replica is not replica:
            return
        self._unbind()
        if not is_local and replica.fail(monotonic(), is_refused=True):
            self.entry.service.refresh(monotonic())
        if self._connects < MAX_CONNECTS + len(self.entry.service.replicas):
            self.seek(replica)
        elif is_local:
            self.refuse(
                ProxyRefusal(503, "plane.busy", "no more connections can be made for now", retry_s=2.0)
            )
        else:
            self.refuse(ProxyRefusal(502, "replica.unreachable", "no replica could be reached"))

    def _send(self, up: Upstream) -> None:
        """Send the head and the body so far. A body that was sent whole is kept until the reply begins."""
        self.up = up
        client, entry = self.client, self.entry
        body = b""
        if self._held:
            body = b"".join(self._held)
            self._held = []
        self._replay = body if self.is_whole else None
        if self._num_held_bytes and not self.is_whole:
            self._release_bytes()
        forwarded, request_id, ends = client.forwarded, self.request_id, up.replica.ends_head
        # The same parts as in `message`.
        head = (entry.start, self.query, entry.prefix, self.own_headers, forwarded, request_id, ends, body)
        up.send(self, b"".join(head))
        if client.is_stalled:
            client.pause_writing()  # pause this new connection as well
        if not self.is_whole:
            client.resume()
        elif 0 <= self.length <= entry.hedge_bytes:
            self._hedge = Hedge(self, entry.service.spec.hedge_s)

    def hold(self) -> None:
        """The replica reads more slowly than the caller sends, so from now on the time limit is the
        replica's.
        """
        self.client.hold()
        self._is_replica_stalled = True
        if not self.is_whole:
            self.client.due = monotonic() + self.entry.service.timeout_s

    def resume(self) -> None:
        self.client.resume()
        self._is_replica_stalled = False
        if not self.is_whole and not self.is_answered:
            self.client.due = FOREVER

    # From the replica.

    def on_reply(self, reply: ProxyReply, body: bytes, *, is_whole: bool) -> None:
        now = monotonic()
        replica = self.replica
        assert replica is not None
        replica.tally.first_byte[bisect_left(BOUNDS_S, now - self.began)] += 1
        if reply.status >= 500 or self._prefill or replica.failures or replica.ejections:
            self._judge(replica, reply.status, now)
        self._reply = reply
        self._replay = None
        if self._num_held_bytes:
            self._release_bytes()
        self._counts = replica.tally if reply.is_stream else None
        if self._hedge is not None:
            self._hedge.end()
        self.is_answered = True
        client = self.client
        client.due = now + self.entry.service.timeout_s
        if self._rewriter is None and self.entry.is_http10:
            self._rewriter = ReplyRewriter()
        # The request's id is the last header of the replica's part; the data plane's own lines follow it.
        named = self.request_id if reply.has_cors else self.request_id + self.entry.cors
        if self._rewriter is not None:
            client.is_last = client.is_last or self.entry.is_http10
            head = self._rewriter.head(reply, named)
            client.write(head + (self._rewriter.data(body) if body else b""))
            return
        if reply.length == UNTIL_CLOSE and not self.is_head:
            client.is_last = True
        end = b"\r\n\r\n"
        if client.is_last or reply.upgrade:
            end = b"\r\n%b\r\n" % (reply.upgrade or b"connection: close\r\n")
        write = client.write
        write(b"".join((reply.start, named, end, body)))
        if reply.status == 101:
            self.is_tunnel = True
            client.switch()

    def on_data(self, data: bytes, num_chunks: int = 1) -> None:
        """Relay a piece of the body as the replica framed it."""
        self._has_moved = True
        counts = self._counts
        if counts is not None:
            counts.tokens += num_chunks
        write = self.client.write
        write(data if self._rewriter is None else self._rewriter.data(data))

    def on_end(self) -> None:
        reply = self._reply
        self.up = None  # it may serve another request now: a pause for this one must not stop it
        if self._rewriter is not None:
            self.client.write(self._rewriter.end())
        elif reply is not None and reply.length == CHUNKED and not self.is_head:
            self.client.write(LAST_CHUNK)
        self._end(is_error=reply is not None and reply.status >= 500)
        self.client.finish()

    def on_lost(self, reason: str) -> None:
        """Handle the loss of the connection to the replica before the reply was over."""
        self.up = None
        if self._reply is not None and self._reply.status == 101:
            self._end(is_error=False)
            self.client.is_last = True
            self.client.finish()
            return
        replica, service = self.replica, self.entry.service
        if replica is not None:
            replica.close_idle()  # they may have ended with it unnoticed: a second try needs a new connection
        self._count_failure(monotonic())
        if self._hedge is not None and self._hedge.take_over():
            return
        if (
            self.entry.is_safe
            and self._replay is not None
            and self._tries < service.spec.retries
            and service.may_retry()
        ):
            self._tries += 1
            self._held = [self._replay] if self._replay else []
            self._unbind()
            self.seek(replica)
            return
        outcome = "the request may have had an effect"
        if self.entry.is_safe:
            tries = self._tries + 1
            times = "once" if tries == 1 else f"{tries} times"
            outcome = f"tried {times}; it does no harm to ask again"
        self.refuse(ProxyRefusal(502, "replica.lost", f"{reason}; {outcome}"))

    def _judge(self, replica: LiveReplica, status: int, now: float) -> None:
        if self._prefill:
            replica.prefill_tokens -= self._prefill
            self._prefill = 0
        if status in GATEWAY_ERRORS:
            self._count_failure(now)
        elif replica.failures or replica.ejections:
            replica.succeed()

    def _count_failure(self, now: float) -> None:
        if self.replica is not None and self.replica.fail(now):
            self.entry.service.refresh(now)

    # A hedge in a second replica.

    def pick_second(self) -> LiveReplica | None:
        """Return another replica with a free slot, if no request waits and the retry budget allows it."""
        service = self.entry.service
        if service.waiting.count:
            return None
        second = service.pick(self.hints, self.replica)
        return second if second is not self.replica and second is not None and service.may_retry() else None

    def message(self, replica: LiveReplica) -> bytes:
        """Return the request for that replica, with the body that was kept."""
        forwarded, body = self.client.forwarded, self._replay or b""
        entry = self.entry
        head = (entry.start, self.query, entry.prefix, self.own_headers, forwarded, self.request_id)
        return b"".join((*head, replica.ends_head, body))

    def open(self, replica: LiveReplica, seeker: ConnectionSeeker) -> None:
        self.client.open(replica, seeker)

    def move_to(self, replica: LiveReplica, up: Upstream) -> None:
        """Leave the current replica for this one, where the hedge has already taken a slot."""
        self._hedge = None
        self._unbind()
        self.replica = replica
        self._is_bound = True
        self.up = up
        if self.client.is_stalled:
            self.client.pause_writing()

    def count_replica_failure(self, replica: LiveReplica, *, is_refused: bool = False) -> None:
        now = monotonic()
        if replica.fail(now, is_refused=is_refused):
            self.entry.service.refresh(now)

    # The end.

    def _unbind(self) -> None:
        """Give the slot to a waiting request."""
        replica = self.replica
        if replica is None:
            return
        self.replica = None
        self._is_bound = False
        replica.outstanding -= 1
        replica.tally.in_flight -= 1
        if self._prefill:
            replica.prefill_tokens -= self._prefill
            self._prefill = 0
        self.account.bound -= 1
        if self.up is not None:
            self.up.close()
            self.up = None
        service = self.entry.service
        if service.waiting.count:
            service.pump()

    def _end(self, *, is_error: bool) -> None:
        """Give everything back, exactly once."""
        self._is_over = True
        service = self.entry.service
        tally = self.replica.tally if self.replica is not None else service.tallies[0]
        tally.requests += 1
        if is_error:
            tally.errors += 1
        if self._is_waiting:
            self._is_waiting = False
            if self in self.account.waiting:
                service.waiting.remove(self)
        self._held = []
        self._replay = None
        if self._num_held_bytes:
            self._release_bytes()
        if self._hedge is not None:
            self._hedge.end()
        self._unbind()
        self.account.admitted -= 1
