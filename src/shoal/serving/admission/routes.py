"""From a request's head to its service, its caller, and the head as the replica will see it.

`ServiceRoutes` is made from every new table, and when a token expires. It remembers results by the exact
bytes of the head, because callers that keep a connection repeat them. For heads that do not repeat, it
remembers what they have in common with others (`head_templates.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote_to_bytes

from shoal.serving.admission.accounts import CallerAccount, digest_of, has_shoal_token
from shoal.serving.admission.head_templates import HeaderKind, HeadTemplates
from shoal.serving.admission.request_policy import (
    check_preflight,
    has_prompt,
    header_lines,
    hedge_bytes,
    hold_bytes,
    may_repeat,
    origin_of,
)
from shoal.serving.balance.service import LiveService
from shoal.serving.proxy.local_reply import HEALTH, HealthRequest, ProxyRefusal
from shoal.serving.proxy.request_head import CHUNKED, RequestHead, parse_head, without_query
from shoal.serving.table import AllowedCaller, ServiceConfig, is_shared_name

MAX_REMEMBERED = 4096
MAX_REMEMBERED_BYTES = 4096
"""Limit of one remembered head: 16 MiB for all of them."""

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
"""Headers that concern one connection only, and those that the data plane writes itself."""
SHOAL_PREFIXES = (b"x-shoal-", b"x-forwarded-")
DECIDING = frozenset(
    {
        b"host",
        b"origin",
        b"authorization",
        b"connection",
        b"proxy-connection",
        b"close",  # as a header's name, for a sender that says that it ends here
        b"upgrade",
        b"expect",
        b"transfer-encoding",
    }
)
"""Headers that decide what becomes of a request, besides the header that a service uses for affinity."""
COUNTED = {
    b"content-length": HeaderKind.LENGTH,
    b"x-request-id": HeaderKind.ID,
    b"idempotency-key": HeaderKind.MARKS,
}
USUAL = frozenset({b"keep-alive", b"close", b""})
"""Words in Connection that name no header."""


class RouteEntry:
    """All that matching heads say about their requests. Made once for them, never changed."""

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
        account: CallerAccount | None,
        written: tuple[bytes, bytes],
        *,
        digest: str = "",
        caller: str = "",
    ) -> None:
        self.service = service
        self.account = account
        """None: the account of the connection's address."""
        self.start, self.prefix = written
        """For the replica: the request line up to the path, and what follows the query."""
        self.digest = digest
        """Digest of the caller's token; empty: the service needed none."""
        self.caller = caller
        """Holder that connections count for; empty: their address."""
        self.cors = header_lines(origin_of(head, service.spec))
        """Reply headers that let the requesting web page read the reply."""
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
        """The replicas are not equally good for it, so the balancer needs hints."""
        self.hold_bytes = hold_bytes(head, service.spec)


RoutedRequest = tuple[RouteEntry, bytes, bytes, bytes, int]
"""A request by its head: the shared entry; its own query with `?`; its id, if acceptable; its headers for the
replica; the length of its body."""


class ServiceRoutes:
    """Services by path and by host, and callers by digest, except those whose token has expired by `now`."""

    def __init__(self, services: Mapping[tuple[str, str], LiveService], now: float) -> None:
        self._by_path = {(p.encode(), n.encode()): live for (p, n), live in services.items()}
        self._by_host: dict[bytes, LiveService] = {}
        for live in services.values():
            for host in live.spec.hosts:
                # A shared name, such as an address, never selects a service, whatever a table says.
                if not is_shared_name(host):
                    self._by_host.setdefault(host.lower().encode(), live)
        self._known_digests: set[str] = set()
        self._callers: dict[tuple[int, str], AllowedCaller] = {}
        self.good_until = float("inf")
        """When the next token expires."""
        for live in services.values():
            for caller in live.spec.callers:
                if caller.expires_at is not None:
                    if caller.expires_at <= now:
                        continue
                    self.good_until = min(self.good_until, caller.expires_at)
                self._known_digests.add(caller.digest)
                self._callers[id(live), caller.digest] = caller
        self._affinities = frozenset(
            filter(None, (_affinity_header(live.spec) for live in services.values()))
        )
        self._templates: HeadTemplates[RouteEntry] = HeadTemplates(self._kind_of)
        self._seen_once: set[int] = set()
        self._remembered: dict[bytes, RoutedRequest] = {}
        self.recall = self._remembered.get
        """Looks up a head by its bytes, if it was seen before."""

    def resolve(self, raw: bytes) -> RoutedRequest:
        """Resolve a head. `ProxyRefusal`: malformed, unknown or not allowed. `HealthRequest` and
        `Preflight`: the request is not for a replica.
        """
        if len(raw) > MAX_REMEMBERED_BYTES:
            return self._read(raw)
        bare, query = without_query(raw)
        matched = self._templates.match(bare)  # a head that matches is unlikely to come again as it is
        match_or_find = matched or self._templates.find(bare)
        if match_or_find is None:
            request = self._read(bare, query, learns=True)
        else:
            entry, request_id, own_headers, length = match_or_find
            request_id = request_id if _is_decent(request_id) else b""
            request = (entry, query, request_id, own_headers, CHUNKED if entry.is_chunked else length)
        if matched is None:
            self._remember(raw, request)
        return request

    def _read(self, raw: bytes, query: bytes = b"", *, learns: bool = False) -> RoutedRequest:
        head = parse_head(raw)
        if head.target == HEALTH and head.method in (b"GET", b"HEAD") and head.length == 0:
            raise HealthRequest
        entry = self._make_entry(head)
        request_id = head.value(b"x-request-id")
        is_plain = head.options <= USUAL and not (head.value(b"expect") or head.value(b"upgrade"))
        if learns and is_plain and _affinity_header(entry.service.spec) not in COUNTED:
            self._templates.learn(raw, entry)
        return (
            entry,
            query,
            request_id if _is_decent(request_id) else b"",
            self._own_headers(head),
            head.length,
        )

    def _remember(self, raw: bytes, request: RoutedRequest) -> None:
        """Remember from the second time on, because most heads that come once never come again."""
        mark = hash(raw)
        if mark in self._seen_once:
            self._remembered[raw] = request
            if len(self._remembered) > MAX_REMEMBERED:
                del self._remembered[next(iter(self._remembered))]  # the oldest
            return
        if len(self._seen_once) >= MAX_REMEMBERED:
            self._seen_once.clear()
        self._seen_once.add(mark)

    def _kind_of(self, name: bytes) -> bytes | HeaderKind:
        """Return what a header is for: its outgoing name, empty if it is dropped, or its `HeaderKind`."""
        if name in COUNTED:
            return COUNTED[name]
        if name in DECIDING or name in self._affinities:
            return HeaderKind.DECIDES
        plain = name.replace(b"_", b"-")  # many servers treat `_` as `-`
        return b"" if plain in STAYS_HERE or plain.startswith(SHOAL_PREFIXES) else name + b": "

    def _own_headers(self, head: RequestHead) -> bytes:
        """Return the headers for the replica that matching heads need not share."""
        lines = []
        for name, value in head.headers:
            kind = self._kind_of(name)
            if kind is HeaderKind.LENGTH:
                lines.append(b"content-length: %d\r\n" % head.length)
            elif kind is HeaderKind.MARKS or (kind and isinstance(kind, bytes)):
                is_named = name in head.options
                lines.append(b"" if is_named else b"%b: %b\r\n" % (name, value))
        return b"".join(lines)

    def admits(self, entry: RouteEntry) -> bool:
        """Return whether an admitted request may go on. If its service is gone, it may."""
        service = entry.service
        return service.is_gone or service.spec.is_public or (id(service), entry.digest) in self._callers

    def _make_entry(self, head: RequestHead) -> RouteEntry:
        service, path = self._find_service(head)
        if service is not None:
            check_preflight(head, service.spec)
        try:
            return self._admit(head, service, path)
        except ProxyRefusal as refused:
            refused.headers = header_lines(origin_of(head, service.spec)) if service is not None else b""
            raise

    def _admit(self, head: RequestHead, service: LiveService | None, path: bytes) -> RouteEntry:
        """Admit the caller. `ProxyRefusal`: unknown, or not allowed."""
        if service is not None and service.spec.is_public:
            _check_open(service, path)
            return RouteEntry(head, service, None, self._replica_head(head, path, keeps_token=True))
        digest = _digest(head)
        if digest is None or digest not in self._known_digests:
            detail = (
                "a token is needed: `Authorization: Bearer TOKEN`"
                if digest is None
                else "the token is not known"
            )
            raise ProxyRefusal(401, "unauthenticated", detail)
        caller = self._callers.get((id(service), digest))
        if service is None or caller is None:
            # One reply for a service that does not exist and for one that the caller may not see.
            path_text = head.target.partition(b"?")[0][:200].decode()
            raise ProxyRefusal(404, "service.unknown", f"no service at `{path_text}`")
        _check_open(service, path)
        name = caller.project if service.spec.limits.per == "project" else caller.name
        written = self._replica_head(head, path, caller=caller.name)
        account = service.account(name)
        return RouteEntry(head, service, account, written, digest=digest, caller=f"caller {caller.name}")

    def _find_service(self, head: RequestHead) -> tuple[LiveService | None, bytes]:
        """Return the service and the target as its program knows it."""
        by_host = self._by_host.get(head.host)
        if by_host is not None:
            return by_host, head.target
        path, mark, query = head.target.partition(b"?")
        parts = path.split(b"/", 3)
        if len(parts) < 3:
            return None, b""
        rest = b"/" + (parts[3] if len(parts) > 3 else b"")
        return self._by_path.get((parts[1], parts[2])), rest + mark + query

    def _replica_head(
        self, head: RequestHead, path: bytes, *, caller: str = "", keeps_token: bool = False
    ) -> tuple[bytes, bytes]:
        """Return the head for the replica, without its end, as far as all matching heads share it."""
        lines = [b" HTTP/1.1", b"host: " + (head.value(b"host") or b"shoal")]
        for name, value in head.headers:
            plain = name.replace(b"_", b"-")
            if (
                self._kind_of(name) is not HeaderKind.DECIDES
                or plain in STAYS_HERE
                or plain.startswith(SHOAL_PREFIXES)
                or (name in head.options and name != b"authorization")
            ):
                continue
            if plain == b"authorization" and (not keeps_token or has_shoal_token(value.decode("latin-1"))):
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
    """Return the part of the path that names the service, which its program does not see."""
    return b"/".join(target.partition(b"?")[0].split(b"/", 3)[:3])


def _check_open(service: LiveService, target: bytes) -> None:
    """Refuse a closed path, read as servers read paths: with `%73` for `s`, and with extra slashes around."""
    if not service.spec.closed:
        return
    path = unquote_to_bytes(target.partition(b"?")[0]).strip(b"/").lower().decode("latin-1")
    if path in service.spec.closed:
        detail = f"`/{path}` manages the server itself and is not for callers"
        raise ProxyRefusal(403, "path.closed", detail)


def _digest(head: RequestHead) -> str | None:
    """Return the digest of the token sent. The time of the lookup reveals nothing, because a digest is
    unguessable.
    """
    kind, _, token = head.value(b"authorization").partition(b" ")
    token = token.strip()
    return digest_of(token.decode("latin-1")) if kind.lower() == b"bearer" and token else None


def _is_decent(name: bytes) -> bool:
    """Return whether a request may keep the id its sender gave it. If not, the data plane makes one."""
    if len(name) > 128:
        return False
    return name.isalnum() or name.replace(b"-", b"").replace(b"_", b"").isalnum()


def _affinity_header(spec: ServiceConfig) -> bytes:
    """Return the header with the service's affinity key; empty: it uses none."""
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
