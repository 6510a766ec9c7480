"""One request's way: awaited, bound to a replica, sent, answered; sent again where that is safe.

Everything that was counted for it is given back exactly once, whichever way it ends.
"""

from __future__ import annotations

from bisect import bisect_left
from time import monotonic
from typing import Protocol

from shoal.serving.accounts import Account, Held
from shoal.serving.answer import UNTIL_CLOSE, Answer
from shoal.serving.balancer import ANY, Ask
from shoal.serving.chunks import LAST
from shoal.serving.head import CHUNKED
from shoal.serving.hedge import GATEWAY_ERRORS, Hedge
from shoal.serving.problem import Refused, document
from shoal.serving.prompt import ask_of
from shoal.serving.replica import LiveReplica, Tally
from shoal.serving.route import Known
from shoal.serving.table import BOUNDS_S
from shoal.serving.upstream import Seeker, Upstream
from shoal.serving.warming import EVERY_S, WANTS_STREAM, Relay, Warm

MAX_CONNECTS = 5
"""Tries to reach some replica, beside one for each: none of them has begun anything anywhere, and all those
of a lost node may have to be tried before one elsewhere."""
OVERHEAD_BYTES = 2048
"""What a request that waits takes beside its body."""
AHEAD_BYTES = 64 << 10
"""Of a body, read beyond what is awaited while there is nobody to send it to."""
FOREVER = float("inf")


class Client(Protocol):
    """The connection that the request came on."""

    due: float
    forwarded: bytes
    """Headers about the caller, for the replica, up to the request's id."""
    held: Held
    is_last: bool
    """No more requests are taken from it."""
    is_stalled: bool
    """The caller does not read what is there for it."""

    def write(self, data: bytes) -> None: ...

    def finish(self) -> None:
        """The response is over."""
        ...

    def refuse(self, refused: Refused, exchange: Exchange) -> None:
        """An answer of our own, whole."""
        ...

    def switch(self) -> None:
        """The replica has agreed to speak another protocol; from now on `tell` takes what comes."""
        ...

    def abort(self) -> None: ...

    def hold(self) -> None: ...

    def resume(self) -> None: ...

    def pause_writing(self) -> None: ...

    def open(self, replica: LiveReplica, seeker: Seeker) -> None:
        """Connect, then call `connected` or `on_refused`."""
        ...


class Exchange:
    __slots__ = (
        "_answer",
        "_connects",
        "_counts",
        "_has_moved",
        "_hedge",
        "_held",
        "_is_bound",
        "_is_deaf",
        "_is_over",
        "_is_waiting",
        "_kept",
        "_prefill",
        "_relay",
        "_replay",
        "_tries",
        "_waits_since",
        "_waits_until",
        "account",
        "ask",
        "began",
        "client",
        "entry",
        "is_answered",
        "is_head",
        "is_tunnel",
        "is_upgrade",
        "is_whole",
        "length",
        "own",
        "query",
        "replica",
        "request_id",
        "up",
        "weight_bytes",
    )

    def __init__(self, client: Client, known: Known, account: Account, now: float) -> None:
        """`known` with an id."""
        self.client = client
        self.entry, self.query, self.request_id, self.own, self.length = known
        entry = self.entry
        self.account = account
        self.began = now
        self.ask: Ask = ANY
        self.is_head = entry.is_head
        self.is_upgrade = entry.is_websocket
        self.is_tunnel = False
        """The replica has agreed to the upgrade. Before that nothing the caller sends is the replica's."""
        self.is_whole = False
        self.replica: LiveReplica | None = None
        self.up: Upstream | None = None
        self.weight_bytes = OVERHEAD_BYTES
        self._held: list[bytes] = []
        self._replay: bytes | None = None
        self._kept = 0
        """Bytes of the body that are counted as held."""
        self._answer: Answer | None = None
        self._counts: Tally | None = None
        """Of the release that streams events to it."""
        self._relay: Relay | None = None
        self._hedge: Hedge | None = None
        self._connects = 0
        self._tries = 0
        self._prefill = 0
        self._waits_since = self._waits_until = FOREVER
        self._is_bound = False
        self._is_waiting = False
        self._is_deaf = False
        """The replica reads nothing of the body."""
        self.is_answered = False
        self._is_over = False
        self._has_moved = False

    # From the caller.

    def on_whole(self, body: bytes) -> None:
        """All of it came at once."""
        self.is_whole = True
        if body:
            if not self._keep(len(body)):
                return
            self._held = [body]
            self.weight_bytes += len(body)
        self.seek()

    def on_body(self, data: bytes) -> None:
        """A piece of the body, as it is framed."""
        if self._is_over:
            return
        if self.up is not None:
            self.up.transport.write(data)
            return
        if not self._keep(len(data)):
            return
        self._held.append(data)
        if self._is_waiting:
            service = self.entry.service
            if not service.waiting.grew(self, len(data), max_bytes=service.spec.queue_bytes):
                self.refuse(Refused(503, "service.busy", "too much waits for this service", retry_s=2.0))
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
            self.on_body(LAST)
        self.is_whole = True
        if self._is_over or self.is_answered or self._is_waiting:
            return
        if self._is_bound:
            self.client.due = monotonic() + self.entry.service.timeout_s
        else:
            self.seek()

    def _keep(self, num_bytes: int) -> bool:
        """Counts them for the process. False: it holds as much as it may, and the request is refused."""
        held = self.client.held
        if held.bytes + num_bytes > held.max_bytes:
            self.refuse(Refused(503, "plane.full", "too many requests are held here", retry_s=2.0))
            return False
        held.bytes += num_bytes
        self._kept += num_bytes
        return True

    def _let_go(self) -> None:
        self.client.held.bytes -= self._kept
        self._kept = 0

    def tell(self, data: bytes) -> None:
        """Through the tunnel."""
        self._has_moved = True
        if self.up is not None:
            self.up.transport.write(data)

    def on_gone(self) -> None:
        """The caller went away: what it asked for is not worth finishing."""
        if not self._is_over:
            self._leave(is_error=False)

    def expire(self, now: float) -> None:
        """Its time is up, or it is time to look."""
        spec = self.entry.service.spec
        if self._is_waiting:
            if now < self._deadline():
                self._warm()
                self.client.due = min(self._waits_until, now + EVERY_S)
                return
            self.refuse(self._waited(now - self._waits_since))
        elif self.is_answered and (self._has_moved or not (self.is_whole or self._is_deaf)):
            self._has_moved = False
            self.client.due = now + spec.timeout_s
        elif self.is_tunnel or self._counts is not None:
            # Nobody has anything to say, and that is nobody's failure: of a tunnel, or of a stream of events.
            # Else whoever opens streams of a quiet kind could have a replica left alone.
            self._leave(is_error=False)
            self.client.abort()
        else:
            self._failed(now)
            self.refuse(Refused(504, "replica.late", f"the replica did not answer for {spec.timeout_s:g} s"))

    @property
    def is_events(self) -> bool:
        """Whether it is answered with a stream of events, which may be quiet for as long as it likes."""
        return self._counts is not None

    @property
    def has_begun(self) -> bool:
        """Whether anything of an answer is on its way to the caller."""
        return self.is_answered or self._relay is not None

    def refuse(self, refused: Refused) -> None:
        """Ends it with an answer of our own, or cuts off one that has begun."""
        if self._is_over:
            return
        self._leave(is_error=refused.status >= 500)
        refused.headers = self.entry.cors
        if self.is_answered:
            self.client.abort()
        elif isinstance(self._relay, Warm):
            self.client.write(self._relay.failed(document(refused, self.request_id.decode())))
            self.client.finish()
        else:
            self.client.refuse(refused, self)

    def _warm(self) -> None:
        """Tell who waits for a stream that it will come. Only while there is no replica: a queue is short."""
        if self._relay is None:
            is_stream = self.is_whole and WANTS_STREAM.search(b"".join(self._held)) is not None
            if not is_stream or self.entry.is_http10 or self.entry.service.open:
                return
            self._relay = Warm()
            self.client.write(self._relay.begin(self.request_id + self.entry.cors))
        if isinstance(self._relay, Warm):
            self.client.write(self._relay.beat())

    # To a replica.

    def seek(self, avoid: LiveReplica | None = None) -> None:
        """A replica now, or as soon as one has a slot."""
        entry = self.entry
        service = entry.service
        if entry.is_asking and self.ask is ANY:
            self.ask = ask_of(entry.affinity, b"".join(self._held) if entry.has_prompt else b"")
        replica = None if service.waiting.count else service.pick(self.ask, avoid)
        if replica is not None:
            self.bind(replica)
            return
        now = monotonic()
        self._is_waiting = True
        self._waits_since = now
        self._waits_until = now + service.spec.queue_s
        self.client.due = min(self._deadline(), now + EVERY_S)
        service.wait(self)

    def _waited(self, waited_s: float) -> Refused:
        service = self.entry.service
        if service.spec.is_failing and not service.open:
            told = f"no replica was ready for {waited_s:.0f} s: they are started and end, one after the other"
            return Refused(503, "service.failing", told, retry_s=30.0)
        told = f"no replica had a free slot for {waited_s:.0f} s"
        return Refused(503, "service.busy", told, retry_s=5.0)

    def _deadline(self) -> float:
        """Later while there is no replica, and still so when one has come: who waited longest has most."""
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
        self._prefill = service.balancer.bound(replica, self.ask)
        # A replica has its time from the request's last byte: nobody makes it late by sending slowly.
        self.client.due = monotonic() + service.timeout_s if self.is_whole else FOREVER
        if replica.idle:
            self._send(replica.idle.pop())
        else:
            self._connects += 1
            self.client.open(replica, self)

    def connected(self, up: Upstream) -> None:
        if self._is_over or self.replica is not up.replica:
            up.close()
        else:
            self._send(up)

    def on_refused(self, replica: LiveReplica, *, is_ours: bool = False) -> None:
        """It could not be reached; nothing has begun anywhere."""
        if self._is_over or self.replica is not replica:
            return
        self._unbind()
        if not is_ours and replica.fail(monotonic(), is_refused=True):
            self.entry.service.refresh(monotonic())
        if self._connects < MAX_CONNECTS + len(self.entry.service.replicas):
            self.seek(replica)
        elif is_ours:
            self.refuse(Refused(503, "plane.busy", "no more connections can be made for now", retry_s=2.0))
        else:
            self.refuse(Refused(502, "replica.unreachable", "no replica could be reached"))

    def _send(self, up: Upstream) -> None:
        """Head and what there is of the body. What was sent whole is kept until the answer begins."""
        self.up = up
        client, entry = self.client, self.entry
        body = b""
        if self._held:
            body = b"".join(self._held)
            self._held = []
        self._replay = body if self.is_whole else None
        if self._kept and not self.is_whole:
            self._let_go()
        own, request_id, ends = self.own, self.request_id, up.replica.ends_head  # as in `message`
        head = (entry.start, self.query, entry.prefix, own, client.forwarded, request_id, ends, body)
        up.send(self, b"".join(head))
        if client.is_stalled:
            client.pause_writing()  # this connection, too
        if not self.is_whole:
            client.resume()
        elif 0 <= self.length <= entry.hedge_bytes:
            self._hedge = Hedge(self, entry.service.spec.hedge_s)

    def hold(self) -> None:
        """The replica reads slower than the caller sends: now it is the one to be waited for."""
        self.client.hold()
        self._is_deaf = True
        if not self.is_whole:
            self.client.due = monotonic() + self.entry.service.timeout_s

    def resume(self) -> None:
        self.client.resume()
        self._is_deaf = False
        if not self.is_whole and not self.is_answered:
            self.client.due = FOREVER

    # From the replica.

    def on_answer(self, answer: Answer, body: bytes, *, is_whole: bool) -> None:
        now = monotonic()
        replica = self.replica
        assert replica is not None
        replica.tally.first_byte[bisect_left(BOUNDS_S, now - self.began)] += 1
        if answer.status >= 500 or self._prefill or replica.failures or replica.ejections:
            self._judge(replica, answer.status, now)
        self._answer = answer
        self._replay = None
        if self._kept:
            self._let_go()
        self._counts = replica.tally if answer.is_stream else None
        if self._hedge is not None:
            self._hedge.end()
        self.is_answered = True
        client = self.client
        client.due = now + self.entry.service.timeout_s
        if self._relay is None and self.entry.is_http10:
            self._relay = Relay()
        # The request's id is the last header written here: what follows it are lines of ours.
        named = self.request_id if answer.has_cors else self.request_id + self.entry.cors
        if self._relay is not None:
            client.is_last = client.is_last or self.entry.is_http10
            head = self._relay.head(answer, named)
            client.write(head + (self._relay.data(body) if body else b""))
            return
        if answer.length == UNTIL_CLOSE and not self.is_head:
            client.is_last = True
        end = b"\r\n\r\n"
        if client.is_last or answer.upgrade:
            end = b"\r\n%b\r\n" % (answer.upgrade or b"connection: close\r\n")
        write = client.write
        write(b"".join((answer.start, named, end, body)))
        if answer.status == 101:
            self.is_tunnel = True
            client.switch()

    def on_data(self, data: bytes, num_chunks: int = 1) -> None:
        """A piece of the body, as the replica framed it."""
        self._has_moved = True
        counts = self._counts
        if counts is not None:
            counts.tokens += num_chunks
        write = self.client.write
        write(data if self._relay is None else self._relay.data(data))

    def on_end(self) -> None:
        answer = self._answer
        self.up = None  # it may be another's by now: what is written here must not pause it
        if self._relay is not None:
            self.client.write(self._relay.end())
        elif answer is not None and answer.length == CHUNKED and not self.is_head:
            self.client.write(LAST)
        self._leave(is_error=answer is not None and answer.status >= 500)
        self.client.finish()

    def on_lost(self, reason: str) -> None:
        """The connection to the replica is gone before the response was over."""
        self.up = None
        if self._answer is not None and self._answer.status == 101:
            self._leave(is_error=False)
            self.client.is_last = True
            self.client.finish()
            return
        replica, service = self.replica, self.entry.service
        if replica is not None:
            replica.close_idle()  # they may have ended with it, unheard: a second try needs a new connection
        self._failed(monotonic())
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
        self.refuse(Refused(502, "replica.lost", f"{reason}; {outcome}"))

    def _judge(self, replica: LiveReplica, status: int, now: float) -> None:
        if self._prefill:
            replica.prefill_tokens -= self._prefill
            self._prefill = 0
        if status in GATEWAY_ERRORS:
            self._failed(now)
        elif replica.failures or replica.ejections:
            replica.succeed()

    def _failed(self, now: float) -> None:
        if self.replica is not None and self.replica.fail(now):
            self.entry.service.refresh(now)

    # In a second replica, too.

    def second(self) -> LiveReplica | None:
        """Somebody else with a free slot that nobody waits for, within what may be sent again."""
        service = self.entry.service
        if service.waiting.count:
            return None
        found = service.pick(self.ask, self.replica)
        return found if found is not self.replica and found is not None and service.may_retry() else None

    def message(self, replica: LiveReplica) -> bytes:
        """For that replica, with the body that was kept."""
        forwarded, body = self.client.forwarded, self._replay or b""
        entry = self.entry
        head = (entry.start, self.query, entry.prefix, self.own, forwarded, self.request_id)
        return b"".join((*head, replica.ends_head, body))

    def open(self, replica: LiveReplica, seeker: Seeker) -> None:
        self.client.open(replica, seeker)

    def move(self, replica: LiveReplica, up: Upstream) -> None:
        """From the one that has it to that one, where a slot was taken for it."""
        self._hedge = None
        self._unbind()
        self.replica = replica
        self._is_bound = True
        self.up = up
        if self.client.is_stalled:
            self.client.pause_writing()

    def failed(self, replica: LiveReplica, *, is_refused: bool = False) -> None:
        now = monotonic()
        if replica.fail(now, is_refused=is_refused):
            self.entry.service.refresh(now)

    # The end.

    def _unbind(self) -> None:
        """Gives the slot to who waits for it."""
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

    def _leave(self, *, is_error: bool) -> None:
        """Once, whichever way it ends."""
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
        if self._kept:
            self._let_go()
        if self._hedge is not None:
            self._hedge.end()
        self._unbind()
        self.account.admitted -= 1
