"""Start a supervisor where another machine's engine put us, and be its hands to the control plane.

Started as `python -m shoal.runtime.keep NODE` with a `Summons` on standard input; NODE may be `$NAME`, a
variable of the cluster's that holds it. The keeper fetches the order over TLS and forks the supervisor, which
then runs as it would on the control plane's own machine: a share in a spool on this node's disk. The keeper
hands in what stands there: the log in pieces, which the disk holds while nobody can be reached, and the
outcome; and passes on a stop. If the supervisor dies without a word it kills what is left and says so: it is
the evidence for that. Whatever keeps it from its order it says on standard error, which the engine keeps.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from types import FrameType

import msgspec

from shoal import bounded_file
from shoal.clock import BootClock
from shoal.runtime import entry, kernel, places, removal, spool, tree
from shoal.runtime.desk import DeskClient, Refused, Silent
from shoal.wire import (
    KEEPER_PING_S,
    MAX_OUTCOME_MESSAGE,
    Assignment,
    Credentials,
    Dispatch,
    DispatchAnswer,
    EndKind,
    Fetch,
    GpuHandle,
    NodeOutcome,
    Order,
    Summons,
)

DONE, NO_ORDER, STOPPED, UNDELIVERED, USAGE = 0, 3, 143, 75, 64
TURN_S = 0.1
PIECE = 512 << 10
PING_S, LONE_PING_S = KEEPER_PING_S, 1.0
"""How often to say something where there is nothing to say. Who renews a lease hears of a stop there; who
does not, here alone."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.3, 5.0
FOLLOW_S = 75.0
"""How long to wait for the order in place of a lost share: a little longer than the control plane tries."""
DELIVER_S = 120.0
"""How long beyond the fence the end of a share waits for a control plane that is away: longer than that waits
before it takes the share for fenced. Until then an end that comes late is as good as any."""
KILL_AFTER_S = 10.0
"""A supervisor that has not ended so long after its grace is killed."""
UNREAD_S = 30.0
"""How long the end of a share waits for a disk that does not give the rest of its log."""
ROUND_S = 2.0
"""How long what is left is killed before somebody hears of us again."""
SIGNALLED = "SIGTERM came to its keeper, from the cluster or from somebody on the node"
WORDS = 4000
UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]+")
"""How CUDA names a whole GPU, or a slice of one."""


def main(arguments: list[str]) -> int:
    """0: the share ended and that is recorded. 3: no order was to be had. 75: its end was not delivered."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m shoal.runtime.keep NODE < SUMMONS\n")
        return USAGE
    node = os.environ.get(arguments[0][1:], "") if arguments[0].startswith("$") else arguments[0]
    kernel.hide_memory()
    kernel.become_subreaper()
    os.umask(0o077)
    try:
        summons = msgspec.json.decode(sys.stdin.buffer.read(), type=Summons)
    except msgspec.DecodeError as error:
        _say(f"no summons came on standard input: {error}")
        return USAGE
    keeper = Keeper(summons, node, DeskClient(summons.urls, summons.ca))
    code = keeper.run()
    while code == DONE and keeper.lost is not None and not keeper.is_asked_to_stop:
        keeper = Keeper(summons, node, keeper.client, after=keeper.lost, began_at=keeper.began_at)
        code = keeper.run()
    return code


class Unfit(Exception):
    """The cluster gave something else than the order is for."""


class Keeper:
    """Of one share, from its order to the delivery of its end."""

    def __init__(
        self,
        summons: Summons,
        node: str,
        client: DeskClient,
        after: int | None = None,
        began_at: float | None = None,
    ) -> None:
        """`after`: the incarnation whose share was lost here; what follows it is ours, if anything does.
        `began_at`: when the cluster started the one who had it, and us with it.
        """
        self._summons = summons
        self._node = node
        self._clock = BootClock()
        self.began_at = self._clock.monotonic() if began_at is None else began_at
        self.client = client
        self.lost: int | None = None
        """The incarnation of the share, once it was lost beside others, who may go on with another."""
        self.is_asked_to_stop = False
        self._told_size = 0
        self._quiet_until = 0.0
        self._backoff_s = FIRST_BACKOFF_S
        self._is_heard = True
        self._unread_since: float | None = None
        """Since when the disk does not give what there is to tell."""
        self._unread_word = ""
        """Why it does not give the supervisor's last word, as it was told."""
        self._has_told_start = False
        self._is_stale = False
        self._left = ""
        """What the supervisor left that does not die, in words."""
        self._kill_at: float | None = None
        self._grace_s: float | None = None
        self._shelter: int | None = None
        """Keeps sweepers of old files out of the share's directory."""
        self._fetch = Fetch(
            attempt_id=summons.attempt_id,
            node=node,
            incarnation=summons.incarnation,
            process=summons.process or os.urandom(16).hex(),
            after=after,
        )

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            root = places.make_root(self._summons.spool)
        except OSError as error:
            # Without the order nothing is lost: who submitted it tries again, or gives it up where others
            # have theirs that were started with this keeper.
            _say(f"no order is fetched for {self._fetch.attempt_id}: no place on {self._node}: {error}")
            return NO_ORDER
        found = self._get_order()
        if found is None and self._fetch.after is not None:
            return DONE  # the share before this one has ended, and that is recorded
        if found is None:
            return STOPPED if self.is_asked_to_stop else NO_ORDER
        assignment, asked_at = found
        self._fetch = msgspec.structs.replace(self._fetch, incarnation=assignment.order.incarnation)
        try:
            return self._keep(spool.Share(places.place_of(root, self._fetch)), assignment, asked_at)
        finally:
            if self._shelter is not None:
                os.close(self._shelter)

    def _keep(self, share: spool.Share, assignment: Assignment, asked_at: float) -> int:
        """Nobody else will ever have this order: whatever comes, its end is told."""
        order, credentials = assignment.order, assignment.credentials
        self.client.learn(order.control_urls)
        try:
            order = self._fitted(order)
            self._prepare(share, order, assignment)
            pid = self._fork(share, credentials, asked_at)
        except (OSError, Refused, Silent, Unfit) as error:
            told = f"{self._node} could not begin its share: {error}"
            _say(told)
            return self._deliver(share, order, credentials, self._lost(share, order, told))
        return self._deliver(share, order, credentials, self._attend(share, order, credentials, pid))

    def _on_stop(self, signum: int, frame: FrameType | None) -> None:
        self.is_asked_to_stop = True

    def _get_order(self) -> tuple[Assignment, float] | None:
        """The order, and when it was asked for. None: it was not to be had, and standard error says why."""
        is_first = self._fetch.after is None
        patience_s = self._summons.patience_s if is_first else FOLLOW_S
        deadline, pause, last = (
            self._clock.monotonic() + patience_s,
            FIRST_BACKOFF_S if is_first else TURN_S,
            "",
        )
        while not self.is_asked_to_stop:
            asked_at = self._clock.monotonic()
            try:
                return self.client.fetch(self._summons.ticket, self._fetch), asked_at
            except Refused as error:
                _say(f"no order for {self._fetch.attempt_id} on {self._node}: {error}")
                return None
            except Silent as error:
                if str(error) != last and is_first:
                    last = str(error)
                    _say(f"cannot reach the control plane yet: {last}")
            if self._clock.monotonic() >= deadline:
                _say(f"gave up: no order was to be had in {patience_s:g} s")
                return None
            time.sleep(pause)
            pause = min(pause * 2, MAX_BACKOFF_S)
        return None

    def _fitted(self, order: Order) -> Order:
        """With the devices that the cluster gave, which chose among equals by itself, and within its time.

        Without a standby: no engine is on this machine that could call it, or bury it.
        """
        order = msgspec.structs.replace(order, has_standby=False, time_limit_s=self._limit_s(order))
        name = self._summons.devices_from
        if not name or not order.gpu_ids:
            return order
        given = [part.strip() for part in os.environ.get(name, "").split(",") if part.strip()]
        are_numbers = all(part.isdigit() for part in given)
        if len(given) != len(order.gpu_ids) or not (are_numbers or all(map(UUID.fullmatch, given))):
            seen = f"{name}={','.join(given)}"
            raise Unfit(f"its order is for {len(order.gpu_ids)} GPUs; the cluster gave {seen!r}")
        handles = tuple(
            GpuHandle(index=int(part)) if are_numbers else GpuHandle(index=place, uuid=part)
            for place, part in enumerate(given)
        )
        return msgspec.structs.replace(
            order, gpu_ids=tuple(one.index for one in handles), gpus=handles, are_gpus_chosen_there=True
        )

    def _limit_s(self, order: Order) -> float | None:
        if order.time_limit_s is None or self._summons.time_limit_s is None:
            return order.time_limit_s
        left_s = self._summons.time_limit_s - (self._clock.monotonic() - self.began_at)
        return min(order.time_limit_s, max(0.0, left_s // 1))  # in whole seconds: people read it

    def _prepare(self, share: spool.Share, order: Order, assignment: Assignment) -> None:
        """Make the share's directory on this node, with all the supervisor needs. First the order: of a share
        without one nobody can say that nothing of it runs.
        """
        os.makedirs(os.path.dirname(share.directory), mode=0o700, exist_ok=True)
        os.mkdir(share.directory, 0o700)
        spool.write_order(share, order)
        with contextlib.suppress(OSError):  # NFS locks no directory: then whoever sweeps has to be told
            self._shelter = spool.shelter(share)
        if assignment.has_archive:
            self._fetch_archive(share)
        authority = f"{share.directory}/ca.pem"
        spool.durable_write(authority, self._summons.ca.encode())
        first, *others = self._summons.urls
        server = {"url": first, "others": others, "tls_cert": authority}
        spool.durable_write(f"{share.directory}/server.json", msgspec.json.encode(server))

    def _fetch_archive(self, share: spool.Share) -> None:
        deadline, pause = self._clock.monotonic() + self._summons.patience_s, FIRST_BACKOFF_S
        while True:
            try:
                self.client.fetch_archive(self._summons.ticket, self._fetch, share.archive)
                return
            except Silent:
                if self.is_asked_to_stop or self._clock.monotonic() >= deadline:
                    raise
            time.sleep(pause)
            pause = min(pause * 2, MAX_BACKOFF_S)

    def _fork(self, share: spool.Share, credentials: Credentials, asked_at: float) -> int:
        reader, writer = os.pipe()
        keeper, pid = os.getpid(), os.fork()
        if pid == 0:
            os.close(writer)
            _become_supervisor(share, reader, asked_at, keeper)
        os.close(reader)
        # One that is dead already is found so.
        with contextlib.suppress(BrokenPipeError), open(writer, "wb") as pipe:
            pipe.write(msgspec.json.encode(credentials))
        return pid

    def _attend(self, share: spool.Share, order: Order, credentials: Credentials, pid: int) -> NodeOutcome:
        """Hand in what there is until the supervisor has ended; how it did."""
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if self.is_asked_to_stop and self._grace_s is None:
                self._stop(share, order.grace_s, SIGNALLED, is_unasked=True)
            if self._kill_at is not None and self._clock.monotonic() >= self._kill_at:
                os.kill(pid, signal.SIGKILL)
            self._hand_in(share, order, credentials)
            time.sleep(TURN_S)
        return self._bury(share, order, credentials)

    def _hand_in(self, share: spool.Share, order: Order, credentials: Credentials) -> None:
        """A piece of the log, if there is one, or a sign of life, if it is time."""
        has_news = not self._has_told_start and os.path.exists(share.started)
        with contextlib.suppress(OSError):  # the disk does not say: the next sign of life tries to read it
            has_news = has_news or _size_of(share.log) > self._told_size
        is_time = self._clock.monotonic() >= self._quiet_until
        # Somebody who does not answer is not asked more often for having much to say, nor who cannot be told.
        can_be_told = self._is_heard and self._unread_since is None
        if not self._is_stale and (is_time or (has_news and can_be_told)):
            self._tell(share, order, credentials, None)

    def _tell(
        self, share: spool.Share, order: Order, credentials: Credentials, outcome: NodeOutcome | None
    ) -> DispatchAnswer | None:
        """Say what there is, the outcome with the last piece of the log; None: nobody heard it, or the disk
        does not give it. Sets when to speak next.
        """
        now = self._clock.monotonic()
        offset = self._told_size
        try:
            started, data = spool.read_started(share), _read_piece(share.log, offset)
            self._unread_since = None
        except OSError as error:
            if self._unread_since is None:
                _say(f"the disk does not give what there is to tell: {error}")
            self._unread_since = self._unread_since or now
            if outcome is not None and now < self._unread_since + UNREAD_S:
                self._be_unheard(now)
                return None
            started, data = None, b""  # that we live can be told all the same
        piece, is_rest = data[:PIECE], len(data) <= PIECE
        told = Dispatch(
            attempt_id=order.attempt_id,
            epoch=order.epoch,
            node=self._node,
            incarnation=order.incarnation,
            process=self._fetch.process,
            offset=offset,
            started_at=None if started is None else started.at,
            outcome=outcome if is_rest else None,
            left=self._left if outcome is None else "",
            will_follow=is_rest and self._will_follow(order, outcome),
        )
        try:
            answer = self.client.tell(credentials.proof_key, told, piece)
        except (Silent, Refused) as error:
            if isinstance(error, Refused) and error.is_stale:
                _say(f"this share is not ours any more: {error}")
                self._is_stale = True
                self._stop(share, 0.0)
            self._be_unheard(now)
            return None
        self._told_size, self._backoff_s, self._is_heard = answer.size, FIRST_BACKOFF_S, True
        self._has_told_start = self._has_told_start or started is not None
        self._quiet_until = now + (LONE_PING_S if order.control_url is None else PING_S)
        if answer.stop_grace_s is not None and outcome is None:
            self._stop(share, answer.stop_grace_s)
        return answer

    def _be_unheard(self, now: float) -> None:
        self._is_heard = False
        self._quiet_until = now + self._backoff_s
        self._backoff_s = min(self._backoff_s * 2, MAX_BACKOFF_S)

    def _will_follow(self, order: Order, outcome: NodeOutcome | None) -> bool:
        """Whether others of the attempt may go on with another share in place of this one, begun here."""
        is_lost = outcome is not None and outcome.kind in (EndKind.LOST, EndKind.FENCED)
        may_stay = self._summons.can_follow and not self.is_asked_to_stop and self._grace_s is None
        return is_lost and may_stay and len(order.nodes) > 1 and order.max_restarts > 0

    def _stop(
        self, share: spool.Share, grace_s: float, because: str = "", *, is_unasked: bool = False
    ) -> None:
        """Ask the supervisor to end, as an engine on its own machine would. The shortest grace counts."""
        if self._grace_s is not None and self._grace_s <= grace_s:
            return
        self._grace_s = grace_s
        self._kill_at = self._clock.monotonic() + grace_s + KILL_AFTER_S
        stop = spool.Stop(grace_s=grace_s, at=self._clock.now(), because=because, is_unasked=is_unasked)
        try:
            spool.write_stop(share, stop)
        except OSError as error:
            _say(f"the disk does not take the stop, a signal has to do: {error}")
        with contextlib.suppress(OSError):  # nor who the supervisor is; the kill that follows knows
            spool.signal_supervisor(share)

    def _bury(self, share: spool.Share, order: Order, credentials: Credentials) -> NodeOutcome:
        """The supervisor has ended: how, by its own word. If it left none, see that nothing of the share runs
        and say so, also where the disk does not take it. Until then say that something does not die: nobody
        is left to keep a fence.
        """
        patience_ends_at = self._clock.monotonic() + KILL_AFTER_S
        while (outcome := self._word_of(share, patience_ends_at)) is None:
            if _are_gone(share, order):
                words = _last_words(share.errors)
                _say(f"the supervisor died without an outcome: {words or 'it said nothing'}")
                last = f"; it last said: {words}" if words else ""
                lost = self._lost(share, order, f"its supervisor died without an outcome{last}")
                try:
                    spool.write_outcome(share, lost)
                except OSError as error:
                    _say(f"the disk does not take that, it is told all the same: {error}")
                return lost
            if not self._left and self._clock.monotonic() >= patience_ends_at:
                self._left = f"the supervisor on {self._node} is dead, and something of it does not die"
                self._quiet_until = 0.0
                _say(self._left)
            self._hand_in(share, order, credentials)
            time.sleep(TURN_S)
        return outcome

    def _word_of(self, share: spool.Share, until: float) -> NodeOutcome | None:
        """The supervisor's own; None: it left none, or none that the disk gives by then."""
        while True:
            try:
                return spool.read_outcome(share)
            except OSError as error:
                if self._clock.monotonic() >= until:
                    if str(error) != self._unread_word:
                        self._unread_word = str(error)
                        _say(f"the disk does not say how the supervisor ended: {error}")
                    return None
            time.sleep(TURN_S)

    def _lost(self, share: spool.Share, order: Order, told: str) -> NodeOutcome:
        started = None
        with contextlib.suppress(OSError):
            started = spool.read_started(share)
        return NodeOutcome(
            attempt_id=order.attempt_id,
            epoch=order.epoch,
            node=order.node,
            kind=EndKind.LOST,
            ended_at=self._clock.now(),
            message=told[:MAX_OUTCOME_MESSAGE],
            started_at=None if started is None else started.at,
            incarnation=order.incarnation,
        )

    def _deliver(
        self, share: spool.Share, order: Order, credentials: Credentials, outcome: NodeOutcome
    ) -> int:
        """Hand in the rest of the log, then the outcome, until that is recorded. Then the files may go."""
        deadline = self._clock.monotonic() + order.fence_s + DELIVER_S
        while not self._is_stale and self._clock.monotonic() < deadline:
            answer = self._tell(share, order, credentials, outcome)
            if answer is not None and answer.is_recorded:
                if self._will_follow(order, outcome):
                    self.lost = order.incarnation
                removal.remove(share.directory, timeout_s=DELIVER_S)
                return DONE
            if answer is None:
                time.sleep(self._backoff_s)
        _say(f"the end of the share could not be delivered; it stays in {share.directory}")
        return UNDELIVERED


def _become_supervisor(share: spool.Share, reader: int, asked_at: float, keeper: int) -> None:
    """Never returns: this process must not go on as a second keeper."""
    status = 1
    try:
        # A cluster whose task has ended calls the job over, and may not find what the task had started. Once
        # the supervisor has started anything it ends that first: see `kept`.
        kernel.die_with_parent(keeper)
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        errors = os.open(share.errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        for fd, target in ((reader, 0), (errors, 1), (errors, 2)):
            os.dup2(fd, target)
        os.closerange(3, 1 << 16)
        os.environ["SHOAL_SERVER_FILE"] = f"{share.directory}/server.json"
        os.environ.setdefault("SHOAL_PATH", os.environ.get("PATH", os.defpath))
        kernel.rename((sys.executable, "-m", "shoal.runtime.supervisor", share.directory))
        status = entry.main([share.directory], asked_at, keeper)
    except BaseException:  # noqa: BLE001 - told where the keeper finds it
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _are_gone(share: spool.Share, order: Order) -> bool:
    """Kill what the supervisor left. False: something does not die, or nobody can see whether it does."""
    try:
        # Without the lock: who had it was our child and is dead, and nobody else comes for it.
        return _kill_children() and spool.kill_leftovers(share.directory, order, timeout_s=ROUND_S)
    except OSError:
        return False


def _kill_children() -> bool:
    """All that the supervisor had started and left is below this process, whatever became of its marks: see
    `become_subreaper`. False: something does not die.
    """
    return tree.kill_until_gone(lambda: tree.descendants(os.getpid()), timeout_s=ROUND_S, between=_reap)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _read_piece(path: str, offset: int) -> bytes:
    """One byte more than a piece: then there is more."""
    try:
        with bounded_file.plain_file(path) as fd:
            return os.pread(fd, PIECE + 1, offset)
    except FileNotFoundError:
        return b""


def _last_words(path: str) -> str:
    try:
        return bounded_file.read_end(path, WORDS).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def _say(text: str) -> None:
    """Where there is room for it: nobody is to die for having something to say."""
    with contextlib.suppress(OSError):
        os.write(2, f"shoal keeper: {text}\n".encode("utf-8", "replace"))
