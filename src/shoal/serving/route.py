"""From a request's head to the service meant, the caller, and the head as a replica will see it.

`Routes` is made anew from every table, and when a token ends. What it finds is remembered by the exact bytes
of the head: callers that keep a connection repeat them. Of heads that do not repeat, what they have in common
with others is (`alike.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote_to_bytes

from shoal.serving.accounts import Account
from shoal.serving.alike import Alike, Kind
from shoal.serving.callers import digest_of, is_ours
from shoal.serving.cors import check_preflight, header_lines, origin_of
from shoal.serving.freshness import HEALTH
from shoal.serving.head import CHUNKED, RequestHead, parse_head, without_query
from shoal.serving.problem import HealthAsked, Refused
from shoal.serving.repeating import has_prompt, hedge_bytes, hold_bytes, may_repeat
from shoal.serving.service import LiveService
from shoal.serving.table import Caller, Service, is_shared_name

MAX_REMEMBERED = 4096
MAX_REMEMBERED_BYTES = 4096
"""Of one head: 16 MiB of them at most."""

STAYS_HERE = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"content-length",
        b"expect",
        b"host",
        b"forwarded",
        b"x-real-ip",
        b"x-request-id",
    }
)
"""Headers between two neighbours, and those the data plane writes itself."""
OURS = (b"x-shoal-", b"x-forwarded-")
DECIDING = frozenset(
    {
        b"host",
        b"origin",
        b"authorization",
        b"connection",
        b"proxy-connection",
        b"close",  # as a header's name, for who says that it ends here
        b"upgrade",
        b"expect",
        b"transfer-encoding",
    }
)
"""What becomes of a request depends on what these say, beside what a service goes by for affinity."""
COUNTED = {b"content-length": Kind.LENGTH, b"x-request-id": Kind.ID, b"idempotency-key": Kind.MARKS}
USUAL = frozenset({b"keep-alive", b"close", b""})
"""Words in Connection that name no header."""


class Entry:
    """All that heads alike say about their requests. Made once for them, never changed."""

    __slots__ = (
        "account",
        "affinity",
        "caller",
        "cors",
        "digest",
        "has_prompt",
        "hedge_bytes",
        "hold_bytes",
        "is_asking",
        "is_chunked",
        "is_expecting",
        "is_head",
        "is_http10",
        "is_keep_alive",
        "is_safe",
        "is_websocket",
        "prefix",
        "service",
        "start",
    )

    def __init__(
        self,
        head: RequestHead,
        service: LiveService,
        account: Account | None,
        written: tuple[bytes, bytes],
        *,
        digest: str = "",
        caller: str = "",
    ) -> None:
        self.service = service
        self.account = account
        """None: of whoever has the connection's address."""
        self.start, self.prefix = written
        """For the replica: the request line as far as the path, and what follows the query."""
        self.digest = digest
        """Of the caller's token; empty: the service needed none."""
        self.caller = caller
        """Whom connections are counted against; empty: the address that they come from."""
        self.cors = header_lines(origin_of(head, service.spec))
        """For the answer: headers that let the web page which asked read it."""
        self.is_head = head.method == b"HEAD"
        self.is_chunked = head.length == CHUNKED
        self.is_http10 = head.is_http10
        self.is_keep_alive = head.is_keep_alive
        self.is_expecting = head.is_expecting
        self.is_websocket = head.is_websocket
        self.is_safe = may_repeat(head, service.spec)
        self.hedge_bytes = hedge_bytes(head, service.spec)
        self.affinity = _affinity(head, service.spec.affinity)
        self.has_prompt = has_prompt(head, service.spec)
        self.is_asking = bool(self.affinity) or self.has_prompt
        """Not every replica is as good as another."""
        self.hold_bytes = hold_bytes(head, service.spec)


Known = tuple[Entry, bytes, bytes, bytes, int]
"""A request by its head: what it has in common with others; its own query with its mark, id if it has a
decent one, headers for the replica and length of its body."""


class Routes:
    """Services by path and by host, callers by digest, but for those whose token has ended by `now`."""

    def __init__(self, services: Mapping[tuple[str, str], LiveService], now: float) -> None:
        self._by_path = {(p.encode(), n.encode()): live for (p, n), live in services.items()}
        self._by_host: dict[bytes, LiveService] = {}
        for live in services.values():
            for host in live.spec.hosts:
                # What callers of paths write there is nobody's name, whatever a table says.
                if not is_shared_name(host):
                    self._by_host.setdefault(host.lower().encode(), live)
        self._known: set[str] = set()
        self._callers: dict[tuple[int, str], Caller] = {}
        self.good_until = float("inf")
        """When the next token ends."""
        for live in services.values():
            for caller in live.spec.callers:
                if caller.expires_at is not None:
                    if caller.expires_at <= now:
                        continue
                    self.good_until = min(self.good_until, caller.expires_at)
                self._known.add(caller.digest)
                self._callers[id(live), caller.digest] = caller
        self._affinities = frozenset(filter(None, (_affinity_header(one.spec) for one in services.values())))
        self._alike: Alike[Entry] = Alike(self._kind_of)
        self._once: set[int] = set()
        self._remembered: dict[bytes, Known] = {}
        self.recall = self._remembered.get
        """A head seen before, by its bytes."""

    def resolve(self, raw: bytes) -> Known:
        """`Refused`: malformed, not known, not allowed. `HealthAsked`, `Preflight`: not for a replica."""
        if len(raw) > MAX_REMEMBERED_BYTES:
            return self._read(raw)
        bare, query = without_query(raw)
        shaped = self._alike.shaped(bare)  # most likely it never comes again
        found = shaped or self._alike.find(bare)
        if found is None:
            known = self._read(bare, query, learns=True)
        else:
            entry, request_id, own, length = found
            request_id = request_id if _is_decent(request_id) else b""
            known = (entry, query, request_id, own, CHUNKED if entry.is_chunked else length)
        if shaped is None:
            self._remember(raw, known)
        return known

    def _read(self, raw: bytes, query: bytes = b"", *, learns: bool = False) -> Known:
        head = parse_head(raw)
        if head.target == HEALTH and head.method in (b"GET", b"HEAD") and head.length == 0:
            raise HealthAsked
        entry = self._made(head)
        request_id = head.value(b"x-request-id")
        is_plain = head.options <= USUAL and not (head.value(b"expect") or head.value(b"upgrade"))
        if learns and is_plain and _affinity_header(entry.service.spec) not in COUNTED:
            self._alike.learn(raw, entry)
        return entry, query, request_id if _is_decent(request_id) else b"", self._own(head), head.length

    def _remember(self, raw: bytes, known: Known) -> None:
        """From the second time on: most heads that come once never come again."""
        mark = hash(raw)
        if mark in self._once:
            self._remembered[raw] = known
            if len(self._remembered) > MAX_REMEMBERED:
                del self._remembered[next(iter(self._remembered))]  # the oldest
            return
        if len(self._once) >= MAX_REMEMBERED:
            self._once.clear()
        self._once.add(mark)

    def _kind_of(self, name: bytes) -> bytes | Kind:
        """Of a header: as it goes on, not at all (empty), or what else it is."""
        if name in COUNTED:
            return COUNTED[name]
        if name in DECIDING or name in self._affinities:
            return Kind.DECIDES
        plain = name.replace(b"_", b"-")  # many servers take one for the other
        return b"" if plain in STAYS_HERE or plain.startswith(OURS) else name + b": "

    def _own(self, head: RequestHead) -> bytes:
        """Headers for the replica that heads alike need not have in common."""
        lines = []
        for name, value in head.headers:
            kind = self._kind_of(name)
            if kind is Kind.LENGTH:
                lines.append(b"content-length: %d\r\n" % head.length)
            elif kind is Kind.MARKS or (kind and isinstance(kind, bytes)):
                is_named = name in head.options
                lines.append(b"" if is_named else b"%b: %b\r\n" % (name, value))
        return b"".join(lines)

    def admits(self, entry: Entry) -> bool:
        """Whether a request that was let in may go on. Of a service that is gone, all do."""
        service = entry.service
        return service.is_gone or service.spec.is_public or (id(service), entry.digest) in self._callers

    def _made(self, head: RequestHead) -> Entry:
        service, path = self._found(head)
        if service is not None:
            check_preflight(head, service.spec)
        try:
            return self._admitted(head, service, path)
        except Refused as refused:
            refused.headers = header_lines(origin_of(head, service.spec)) if service is not None else b""
            raise

    def _admitted(self, head: RequestHead, service: LiveService | None, path: bytes) -> Entry:
        """`Refused`: not known, or not allowed."""
        if service is not None and service.spec.is_public:
            _check_open(service, path)
            return Entry(head, service, None, self._written(head, path, keeps_token=True))
        digest = _digest(head)
        if digest is None or digest not in self._known:
            told = (
                "a token is needed: `Authorization: Bearer TOKEN`"
                if digest is None
                else "the token is not known"
            )
            raise Refused(401, "unauthenticated", told)
        caller = self._callers.get((id(service), digest))
        if service is None or caller is None:
            # The same for what is not there and for what the caller may not see.
            asked = head.target.partition(b"?")[0][:200].decode()
            raise Refused(404, "service.unknown", f"no service at `{asked}`")
        _check_open(service, path)
        name = caller.project if service.spec.limits.per == "project" else caller.name
        written = self._written(head, path, caller=caller.name)
        account = service.account(name)
        return Entry(head, service, account, written, digest=digest, caller=f"caller {caller.name}")

    def _found(self, head: RequestHead) -> tuple[LiveService | None, bytes]:
        """The service meant, and the target as it knows it."""
        by_host = self._by_host.get(head.host)
        if by_host is not None:
            return by_host, head.target
        path, mark, query = head.target.partition(b"?")
        parts = path.split(b"/", 3)
        if len(parts) < 3:
            return None, b""
        rest = b"/" + (parts[3] if len(parts) > 3 else b"")
        return self._by_path.get((parts[1], parts[2])), rest + mark + query

    def _written(
        self, head: RequestHead, path: bytes, *, caller: str = "", keeps_token: bool = False
    ) -> tuple[bytes, bytes]:
        """The head for the replica as far as it is the same for all heads alike: not ended yet."""
        lines = [b" HTTP/1.1", b"host: " + (head.value(b"host") or b"shoal")]
        for name, value in head.headers:
            plain = name.replace(b"_", b"-")
            if (
                self._kind_of(name) is not Kind.DECIDES
                or plain in STAYS_HERE
                or plain.startswith(OURS)
                or (name in head.options and name != b"authorization")
            ):
                continue
            if plain == b"authorization" and (not keeps_token or is_ours(value.decode("latin-1"))):
                continue
            lines.append(b"%b: %b" % (name, value))
        if head.length == CHUNKED:
            lines.append(b"transfer-encoding: chunked")
        if head.is_websocket:
            lines.append(b"connection: upgrade\r\nupgrade: websocket")
        if caller:
            lines.append(b"x-shoal-caller: " + caller.encode("ascii", "replace"))
        if head.host:
            lines.append(b"x-forwarded-host: " + head.value(b"host"))
        if len(path) < len(head.target):
            lines.append(b"x-forwarded-prefix: " + _prefix(head.target))
        return b"%b %b" % (head.method, path), b"\r\n".join(lines) + b"\r\n"


def _prefix(target: bytes) -> bytes:
    """The part of the path that names the service, which its program does not see."""
    return b"/".join(target.partition(b"?")[0].split(b"/", 3)[:3])


def _check_open(service: LiveService, target: bytes) -> None:
    """As servers read paths: with `%73` for `s`, and whatever slashes around."""
    if not service.spec.closed:
        return
    path = unquote_to_bytes(target.partition(b"?")[0]).strip(b"/").lower().decode("latin-1")
    if path in service.spec.closed:
        told = f"`/{path}` manages the server itself and is not for callers"
        raise Refused(403, "path.closed", told)


def _digest(head: RequestHead) -> str | None:
    """Of the token sent. Looking a digest up tells nothing by its time: nobody can aim at one."""
    kind, _, token = head.value(b"authorization").partition(b" ")
    token = token.strip()
    return digest_of(token.decode("latin-1")) if kind.lower() == b"bearer" and token else None


def _is_decent(name: bytes) -> bool:
    """Whether a request may go by the name its sender gave it; else we call it something."""
    if len(name) > 128:
        return False
    return name.isalnum() or name.replace(b"-", b"").replace(b"_", b"").isalnum()


def _affinity_header(spec: Service) -> bytes:
    """The one that has what the service goes by; empty: it goes by nothing."""
    kind, _, name = spec.affinity.partition(":")
    return b"cookie" if kind == "cookie" else name.lower().encode()


def _affinity(head: RequestHead, wanted: str) -> bytes:
    kind, _, name = wanted.partition(":")
    if kind == "header":
        return head.value(name.lower().encode())
    if kind == "cookie":
        for pair in head.value(b"cookie").split(b";"):
            seen, _, value = pair.strip().partition(b"=")
            if seen == name.encode():
                return value
    return b""
