"""A table as HAProxy's configuration and the maps that it reads. Pure: the same table gives the same text.

What one request meets, in this order: is it HTTP with one meaning, which service is meant, who calls, is
that allowed. Then its backend: limits, the queue, a replica.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import msgspec

from shoal.serving.cors import ANY_ORIGIN, EXPOSED, MAX_AGE_S, METHODS
from shoal.serving.freshness import HEALTH
from shoal.serving.haproxy import porches
from shoal.serving.haproxy.answers import errors, refusal
from shoal.serving.haproxy.backends import Server, backend, backend_name, in_ms, servers
from shoal.serving.haproxy.words import unspeakable
from shoal.serving.head import MAX_HEAD_BYTES, MAX_HEADERS, MAX_TARGET_BYTES
from shoal.serving.problem import Refused, malformed
from shoal.serving.table import Table

CALLERS = "callers.map"
FRESH = "fresh"
"""A key of that map beside digests: it is there while a control plane confirms the table."""
TLS = "tls.pem"
MAX_GUESSES = 100
CONTROLS = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"
HOST = r"^([A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?$"
REWRITE_BYTES = 4096
"""Room for the headers that are added."""
STAYS_HERE = (
    "keep-alive",
    "proxy-connection",
    "proxy-authorization",
    "te",
    "trailer",
    "forwarded",
    "x-real-ip",
)
"""Headers between two neighbours, and those that are written here; those of `Connection`, HAProxy knows."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a configuration is to work. Its files are named from the folder that it stands in."""

    listener: int
    """The number of the listening socket, which HAProxy inherits."""
    max_connections: int = 10_000
    num_threads: int = 0
    """0: as many as there are processors."""
    has_tls: bool = False


class Rendering(msgspec.Struct, frozen=True, kw_only=True):
    frame: str
    """The configuration without server lines; `{servers of NAME}` stands for those of each backend."""
    servers: dict[str, tuple[Server, ...]]
    """By backend."""
    routes: dict[str, str]
    """What `routes` names holds; a name for each content, since HAProxy reads it when it starts."""
    papers: dict[str, str]
    """Files for porches, likewise."""
    callers: dict[str, str]
    """Digests that are known, and digests at a backend with the caller's name: changed without a reload."""

    @property
    def config(self) -> str:
        text = self.frame
        for name, lines in self.servers.items():
            told = "".join(f"    server {server.line}\n" for server in lines)
            text = text.replace(_mark(name) + "\n", told)
        return text


def render(table: Table, place: Place) -> Rendering:
    """`ValueError`: it names something that HAProxy cannot be told; the sentence says what."""
    if found := unspeakable(table):
        raise ValueError(f"table {table.version} cannot be served: {found[0]}")
    routes = dict(_routes(table))
    name = f"routes-{hashlib.sha256(as_map(routes).encode()).hexdigest()[:16]}.map"
    lines = [*_global(place), "", *_defaults(table), "", *_frontend(place, name, table), "", *_guesses()]
    for service in table.services:
        lines += ["", *backend(service), _mark(backend_name(service))]
    return Rendering(
        frame="\n".join(lines) + "\n",
        servers={backend_name(service): servers(service, table.papers) for service in table.services},
        papers=porches.files(table.papers),
        routes={name: as_map(routes)},
        callers=dict(_callers(table)),
    )


def as_map(pairs: dict[str, str]) -> str:
    return "".join(f"{key} {value}\n" for key, value in pairs.items())


def _mark(name: str) -> str:
    return f"    # servers of {name}"


def _routes(table: Table) -> Iterator[tuple[str, str]]:
    """By path, `project/name`, and by host, which has no slash."""
    for service in table.services:
        told = f"{'public' if service.is_public else 'closed'} {backend_name(service)}"
        yield f"{service.project}/{service.name}", told
        for host in service.hosts:
            yield host.lower(), told


def _callers(table: Table) -> Iterator[tuple[str, str]]:
    for service in table.services:
        for caller in service.callers:
            yield caller.digest, "known"
            name = caller.name.encode("ascii", "replace").decode().strip() or "?"
            yield f"{caller.digest}@{backend_name(service)}", name


def _global(place: Place) -> Iterator[str]:
    yield "global"
    yield f"    maxconn {place.max_connections}"
    if place.num_threads:
        yield f"    nbthread {place.num_threads}"
    yield f"    tune.bufsize {MAX_HEAD_BYTES + REWRITE_BYTES}"
    yield f"    tune.maxrewrite {REWRITE_BYTES}"
    yield f"    tune.http.maxhdr {MAX_HEADERS}"
    yield "    ssl-default-bind-options ssl-min-ver TLSv1.2"


def _defaults(table: Table) -> Iterator[str]:
    slowest = max([60.0, *(service.timeout_s for service in table.services)])
    yield "defaults"
    yield "    mode http"
    yield "    timeout connect 5s"
    yield f"    timeout client {in_ms(slowest)}"
    yield "    timeout server 60s"
    yield "    timeout check 5s"
    yield "    timeout http-request 10s"
    yield "    timeout http-keep-alive 75s"
    # An idle connection closed by a reload might cross a request on its way: the next answer says `close`.
    yield "    option idle-close-on-response"
    # Who left wants no answer: its place in the queue, or in the replica, is another's.
    yield "    option abortonclose"
    yield from errors()


def _frontend(place: Place, routes: str, table: Table) -> Iterator[str]:
    tls = f" ssl crt {TLS} alpn http/1.1" if place.has_tls else ""
    yield "frontend services"
    yield f"    bind fd@{place.listener} proto h1{tls}"
    yield f"    maxconn {place.max_connections}"
    decent = "{ req.fhdr(x-request-id,1) -m reg ^[A-Za-z0-9_-]{1,128}$ }"
    yield f"    http-request set-var(txn.id) req.fhdr(x-request-id,1) if {decent}"
    yield "    http-request set-var(txn.id) uuid() if !{ var(txn.id) -m found }"
    yield "    http-after-response set-header x-request-id %[var(txn.id)] if { var(txn.id) -m found }"
    yield from _one_meaning()
    yield from _health()
    yield from _route(routes)
    yield from _pages(table)
    yield from _who()
    yield from _headers("https" if place.has_tls else "http")
    prefix = "path,regsub('^/([^/]*)/([^/]*).*\\$','/\\\\1/\\\\2')"
    yield f'    http-request set-header x-forwarded-prefix "%[{prefix}]" if by_path'
    yield "    http-request replace-path ^/[^/]*/[^/]*$ / if by_path"
    yield "    http-request replace-path ^/[^/]*/[^/]*/(.*)$ /\\1 if by_path"
    yield "    use_backend %[var(txn.backend)]"


def _one_meaning() -> Iterator[str]:
    """As strict as the embedded data plane about what HAProxy would pass on as it came."""
    yield refusal(malformed("the head has a control character"), f"{{ req.hdrs -m reg '{CONTROLS}' }}")
    yield refusal(malformed("the request line is not METHOD TARGET HTTP/1.1"), "!{ req.ver 1.0 1.1 }")
    no_method = Refused(405, "request.method", "this method is not served")
    yield refusal(no_method, "{ method CONNECT TRACE } || !{ method -m reg ^[A-Z-]{1,24}$ }")
    many, none = "{ req.fhdr_cnt(host) gt 1 }", "{ req.fhdr_cnt(host) eq 0 } !{ req.ver 1.0 }"
    strange = f"{{ req.fhdr(host) -m found }} !{{ req.fhdr(host) -m reg '{HOST}' }}"
    yield refusal(malformed("one Host is needed"), f"{many} || {none} || {strange}")
    yield refusal(malformed("more than one Authorization"), "{ req.fhdr_cnt(authorization) gt 1 }")
    target = (
        "!{ path_beg / } || { url_sub '#' } || !{ url_beg / } !{ url -m reg -i '^https?://[^/?#@]+([/?]|$)' }"
    )
    yield refusal(malformed("the target is not a path"), target)
    too_long = Refused(414, "request.target", f"the target is longer than {MAX_TARGET_BYTES} bytes")
    yield refusal(too_long, f"{{ url,length gt {MAX_TARGET_BYTES} }}")
    dots = "the path has dot segments; send it resolved"
    yield refusal(malformed(dots), "{ path -m reg -i '/(\\.|%2e){1,2}(/|%2f|\\\\|%5c|;|$)' }")
    expects = "{ req.hdr(expect) -m found } !{ req.hdr(expect) -m str -i 100-continue }"
    yield refusal(Refused(417, "request.expect", "only `100-continue` can be expected"), expects)


def _health() -> Iterator[str]:
    """As `Downstream` answers it, but for the table's version."""
    asked = f"{{ path {HEALTH.decode()} }} {{ method GET HEAD }}"
    yield f"    acl is_fresh str({FRESH}),map_str({CALLERS}) -m found"
    ok = 'content-type application/json string \'{"status":"ok"}\' hdr cache-control no-store'
    yield f"    http-request return status 200 {ok} if {asked} is_fresh"
    stale = Refused(503, "plane.stale", "no control plane has confirmed the table lately", retry_s=1.0)
    yield refusal(stale, asked)


def _route(routes: str) -> Iterator[str]:
    yield f"    http-request set-var(txn.route) req.fhdr(host),host_only,lower,map_str({routes})"
    yield "    acl by_host var(txn.route) -m found"
    yield "    acl by_path var(txn.is_path) -m bool"
    yield "    http-request set-var(txn.is_path) bool(true) if !by_host"
    key = "path,regsub('^/([^/]*)/([^/]*).*\\$','\\\\1/\\\\2')"
    yield f'    http-request set-var(txn.route) "{key},map_str({routes})" if by_path'
    yield "    http-request set-var(txn.backend) var(txn.route),word(2,' ')"
    yield "    acl is_public var(txn.route) -m beg public"


def _pages(table: Table) -> Iterator[str]:
    """Cross-origin requests, as `serving.cors` answers them."""
    for service in table.services:
        if service.origins:
            page = "-m found" if ANY_ORIGIN in service.origins else f"-m str {' '.join(service.origins)}"
            own = f"{{ var(txn.backend) -m str {backend_name(service)} }}"
            admitted = f"{own} {{ req.fhdr(origin) {page} }}"
            yield f"    http-request set-var(txn.origin) req.fhdr(origin) if {admitted}"
    asked = (
        "{ method OPTIONS } { req.hdr(access-control-request-method) -m found } { var(txn.origin) -m found }"
    )
    yield (
        "    http-request return status 204 hdr access-control-allow-origin %[var(txn.origin)] "
        f"hdr access-control-allow-methods '{METHODS.decode()}' hdr access-control-max-age {MAX_AGE_S} "
        "hdr access-control-allow-headers %[req.fhdr(access-control-request-headers)] hdr vary origin "
        f"if {asked}"
    )
    allow = "{ var(txn.origin) -m found } !{ res.hdr(access-control-allow-origin) -m found }"
    yield f"    http-after-response add-header vary origin if {allow}"
    yield f"    http-after-response set-header access-control-expose-headers '{EXPOSED.decode()}' if {allow}"
    yield f"    http-after-response set-header access-control-allow-origin %[var(txn.origin)] if {allow}"


def _who() -> Iterator[str]:
    """A token is known by its SHA-256, bound to its id as `serving.callers` says."""
    bearer = "{ req.fhdr(authorization,1) -m reg -i '^bearer +[^ ]' }"
    ours = "'^shl_(tok_[0-9a-z]{1,40})_([0-9a-f]{64})\\$','shoal-token\\\\x00\\\\1\\\\x00\\\\2'"
    digest = (
        f"req.fhdr(authorization,1),regsub('^[A-Za-z]+ +',''),rtrim(' '),regsub({ours}),sha2(256),hex,lower"
    )
    yield f'    http-request set-var(txn.digest) "{digest}" if {bearer}'
    yield f"    http-request set-var(txn.known) var(txn.digest),map_str({CALLERS})"
    yield f"    http-request set-var(txn.caller) var(txn.digest),concat(@,txn.backend),map_str({CALLERS})"
    yield "    acl is_known var(txn.known) -m found"
    yield "    acl is_caller var(txn.caller) -m found"
    yield "    http-request track-sc0 src table guesses if !is_public !is_known"
    yield "    http-request sc-inc-gpc0(0) if !is_public !is_known"
    guesses = Refused(429, "limit.guesses", "too many requests without a known token", retry_s=60.0)
    yield refusal(guesses, f"!is_public !is_known {{ sc_gpc0_rate(0) gt {MAX_GUESSES} }}")
    unknown = Refused(
        401, "unauthenticated", "a token that is known is needed: `Authorization: Bearer TOKEN`"
    )
    yield refusal(unknown, "!is_public !is_known")
    # The same for what is not there and for what the caller may not see.
    yield refusal(Refused(404, "service.unknown", "no such service"), "!is_public !is_caller")


def _guesses() -> Iterator[str]:
    yield "backend guesses"
    yield "    stick-table type ipv6 size 10k expire 60s store gpc0,gpc0_rate(60s)"


def _headers(scheme: str) -> Iterator[str]:
    for name in STAYS_HERE:
        yield f"    http-request del-header {name}"
    yield "    http-request del-header ^x[-_](shoal|forwarded)[-_] -m reg"
    # What `Connection` names somebody behind the replica might take away: the caller's name, for one.
    yield "    acl is_websocket req.hdr(upgrade) -m str -i websocket"
    yield "    http-request set-header connection upgrade if is_websocket"
    yield "    http-request del-header connection if !is_websocket"
    yield "    http-request del-header upgrade if !is_websocket"
    yield "    http-request set-header x-request-id %[var(txn.id)]"
    yield "    http-request set-header x-forwarded-for %[src]"
    yield f"    http-request set-header x-forwarded-proto {scheme}"
    yield "    http-request set-header x-forwarded-host %[req.hdr(host)] if { req.hdr(host) -m found }"
    for name in ("keep-alive", "proxy-connection", "te", "trailer"):
        yield f"    http-response del-header {name}"
    yield "    http-response del-header x-shoal- -m beg"
    yield "    http-response del-header connection unless { status 101 }"
