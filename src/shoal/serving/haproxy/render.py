"""Render a table as HAProxy's configuration and the maps it reads. Pure: the same table gives the same text.

The frontend checks a request in this order: is it HTTP with one meaning, which service does it name, which
caller sends it, is that allowed. Then its backend applies limits, the queue, and picks a replica.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import msgspec

from shoal.serving.admission.request_policy import ANY_ORIGIN, EXPOSED, MAX_AGE_S, METHODS
from shoal.serving.haproxy import backends
from shoal.serving.haproxy.backends import (
    ServerLine,
    backend,
    backend_name,
    error_lines,
    in_ms,
    refusal_line,
    server_lines,
)
from shoal.serving.haproxy.validation import unsupported_settings
from shoal.serving.proxy.local_reply import HEALTH, ProxyRefusal, malformed
from shoal.serving.proxy.request_head import MAX_HEAD_BYTES, MAX_HEADERS, MAX_TARGET_BYTES
from shoal.serving.table import ServingTable

CALLERS = "callers.map"
FRESH = "fresh"
"""A key of that map besides digests. It is present while a control plane confirms the table."""
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
"""Headers that concern one connection only, and those written here. HAProxy itself drops those of
`Connection`."""


class HaproxySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where a configuration is used. Its files are named relative to its folder."""

    listener: int
    """The number of the listening socket, which HAProxy inherits."""
    max_connections: int = 10_000
    num_threads: int = 0
    """0: one for each processor."""
    has_tls: bool = False


class HaproxyConfig(msgspec.Struct, frozen=True, kw_only=True):
    frame: str
    """The configuration without server lines; a marker comment stands for those of each backend."""
    servers: dict[str, tuple[ServerLine, ...]]
    """By backend."""
    routes: dict[str, str]
    """Route maps by file name. The name depends on the content, since HAProxy reads it when it starts."""
    tls_files: dict[str, str]
    """Files for replica sidecars, likewise."""
    callers: dict[str, str]
    """Known digests, and `digest@backend` with the caller's name. They change without a reload."""

    @property
    def config(self) -> str:
        text = self.frame
        for name, lines in self.servers.items():
            server_lines_text = "".join(f"    server {server.line}\n" for server in lines)
            text = text.replace(_mark(name) + "\n", server_lines_text)
        return text


def render(table: ServingTable, settings: HaproxySettings) -> HaproxyConfig:
    """Render the configuration. `ValueError` names the value that HAProxy does not support."""
    if problems := unsupported_settings(table):
        raise ValueError(f"table {table.version} cannot be served: {problems[0]}")
    routes = dict(_routes(table))
    name = f"routes-{hashlib.sha256(as_map(routes).encode()).hexdigest()[:16]}.map"
    lines = [
        *_global(settings),
        "",
        *_defaults(table),
        "",
        *_frontend(settings, name, table),
        "",
        *_guess_table(),
    ]
    for service in table.services:
        lines += ["", *backend(service), _mark(backend_name(service))]
    return HaproxyConfig(
        frame="\n".join(lines) + "\n",
        servers={
            backend_name(service): server_lines(service, table.tls_identity) for service in table.services
        },
        tls_files=backends.tls_files(table.tls_identity),
        routes={name: as_map(routes)},
        callers=dict(_callers(table)),
    )


def as_map(pairs: dict[str, str]) -> str:
    return "".join(f"{key} {value}\n" for key, value in pairs.items())


def _mark(name: str) -> str:
    return f"    # servers of {name}"


def _routes(table: ServingTable) -> Iterator[tuple[str, str]]:
    """Yield the routes by path, `project/name`, and by host, which has no slash."""
    for service in table.services:
        route = f"{'public' if service.is_public else 'closed'} {backend_name(service)}"
        yield f"{service.project}/{service.name}", route
        for host in service.hosts:
            yield host.lower(), route


def _callers(table: ServingTable) -> Iterator[tuple[str, str]]:
    for service in table.services:
        for caller in service.callers:
            yield caller.digest, "known"
            name = caller.name.encode("ascii", "replace").decode().strip() or "?"
            yield f"{caller.digest}@{backend_name(service)}", name


def _global(settings: HaproxySettings) -> Iterator[str]:
    yield "global"
    yield f"    maxconn {settings.max_connections}"
    if settings.num_threads:
        yield f"    nbthread {settings.num_threads}"
    yield f"    tune.bufsize {MAX_HEAD_BYTES + REWRITE_BYTES}"
    yield f"    tune.maxrewrite {REWRITE_BYTES}"
    yield f"    tune.http.maxhdr {MAX_HEADERS}"
    yield "    ssl-default-bind-options ssl-min-ver TLSv1.2"


def _defaults(table: ServingTable) -> Iterator[str]:
    slowest = max([60.0, *(service.timeout_s for service in table.services)])
    yield "defaults"
    yield "    mode http"
    yield "    timeout connect 5s"
    yield f"    timeout client {in_ms(slowest)}"
    yield "    timeout server 60s"
    yield "    timeout check 5s"
    yield "    timeout http-request 10s"
    yield "    timeout http-keep-alive 75s"
    # An idle connection closed by a reload might cross a request on its way, so the next reply says `close`.
    yield "    option idle-close-on-response"
    # A caller that left wants no reply, so its place in the queue or in the replica goes to another.
    yield "    option abortonclose"
    yield from error_lines()


def _frontend(settings: HaproxySettings, routes: str, table: ServingTable) -> Iterator[str]:
    tls = f" ssl crt {TLS} alpn http/1.1" if settings.has_tls else ""
    yield "frontend services"
    yield f"    bind fd@{settings.listener} proto h1{tls}"
    yield f"    maxconn {settings.max_connections}"
    decent = "{ req.fhdr(x-request-id,1) -m reg ^[A-Za-z0-9_-]{1,128}$ }"
    yield f"    http-request set-var(txn.id) req.fhdr(x-request-id,1) if {decent}"
    yield "    http-request set-var(txn.id) uuid() if !{ var(txn.id) -m found }"
    yield "    http-after-response set-header x-request-id %[var(txn.id)] if { var(txn.id) -m found }"
    yield from _one_meaning()
    yield from _health()
    yield from _route(routes)
    yield from _cross_origin(table)
    yield from _identify_caller()
    yield from _headers("https" if settings.has_tls else "http")
    prefix = "path,regsub('^/([^/]*)/([^/]*).*\\$','/\\\\1/\\\\2')"
    yield f'    http-request set-header x-forwarded-prefix "%[{prefix}]" if by_path'
    yield "    http-request replace-path ^/[^/]*/[^/]*$ / if by_path"
    yield "    http-request replace-path ^/[^/]*/[^/]*/(.*)$ /\\1 if by_path"
    yield "    use_backend %[var(txn.backend)]"


def _one_meaning() -> Iterator[str]:
    """Be as strict as the embedded data plane about what HAProxy would pass on as it came."""
    yield refusal_line(malformed("the head has a control character"), f"{{ req.hdrs -m reg '{CONTROLS}' }}")
    yield refusal_line(malformed("the request line is not METHOD TARGET HTTP/1.1"), "!{ req.ver 1.0 1.1 }")
    no_method = ProxyRefusal(405, "request.method", "this method is not served")
    yield refusal_line(no_method, "{ method CONNECT TRACE } || !{ method -m reg ^[A-Z-]{1,24}$ }")
    many, none = "{ req.fhdr_cnt(host) gt 1 }", "{ req.fhdr_cnt(host) eq 0 } !{ req.ver 1.0 }"
    strange = f"{{ req.fhdr(host) -m found }} !{{ req.fhdr(host) -m reg '{HOST}' }}"
    yield refusal_line(malformed("one Host is needed"), f"{many} || {none} || {strange}")
    yield refusal_line(malformed("more than one Authorization"), "{ req.fhdr_cnt(authorization) gt 1 }")
    target = (
        "!{ path_beg / } || { url_sub '#' } || !{ url_beg / } !{ url -m reg -i '^https?://[^/?#@]+([/?]|$)' }"
    )
    yield refusal_line(malformed("the target is not a path"), target)
    too_long = ProxyRefusal(414, "request.target", f"the target is longer than {MAX_TARGET_BYTES} bytes")
    yield refusal_line(too_long, f"{{ url,length gt {MAX_TARGET_BYTES} }}")
    dots = "the path has dot segments; send it resolved"
    yield refusal_line(malformed(dots), "{ path -m reg -i '/(\\.|%2e){1,2}(/|%2f|\\\\|%5c|;|$)' }")
    expects = "{ req.hdr(expect) -m found } !{ req.hdr(expect) -m str -i 100-continue }"
    yield refusal_line(ProxyRefusal(417, "request.expect", "only `100-continue` can be expected"), expects)


def _health() -> Iterator[str]:
    """Answer the health check as `Downstream` does, without the table's version."""
    condition = f"{{ path {HEALTH.decode()} }} {{ method GET HEAD }}"
    yield f"    acl is_fresh str({FRESH}),map_str({CALLERS}) -m found"
    ok = 'content-type application/json string \'{"status":"ok"}\' hdr cache-control no-store'
    yield f"    http-request return status 200 {ok} if {condition} is_fresh"
    stale = ProxyRefusal(503, "plane.stale", "no control plane has confirmed the table lately", retry_s=1.0)
    yield refusal_line(stale, condition)


def _route(routes: str) -> Iterator[str]:
    yield f"    http-request set-var(txn.route) req.fhdr(host),host_only,lower,map_str({routes})"
    yield "    acl by_host var(txn.route) -m found"
    yield "    acl by_path var(txn.is_path) -m bool"
    yield "    http-request set-var(txn.is_path) bool(true) if !by_host"
    key = "path,regsub('^/([^/]*)/([^/]*).*\\$','\\\\1/\\\\2')"
    yield f'    http-request set-var(txn.route) "{key},map_str({routes})" if by_path'
    yield "    http-request set-var(txn.backend) var(txn.route),word(2,' ')"
    yield "    acl is_public var(txn.route) -m beg public"


def _cross_origin(table: ServingTable) -> Iterator[str]:
    """Answer cross-origin requests as `admission/request_policy.py` does."""
    for service in table.services:
        if service.origins:
            page = "-m found" if ANY_ORIGIN in service.origins else f"-m str {' '.join(service.origins)}"
            is_backend = f"{{ var(txn.backend) -m str {backend_name(service)} }}"
            admitted = f"{is_backend} {{ req.fhdr(origin) {page} }}"
            yield f"    http-request set-var(txn.origin) req.fhdr(origin) if {admitted}"
    condition = (
        "{ method OPTIONS } { req.hdr(access-control-request-method) -m found } { var(txn.origin) -m found }"
    )
    yield (
        "    http-request return status 204 hdr access-control-allow-origin %[var(txn.origin)] "
        f"hdr access-control-allow-methods '{METHODS.decode()}' hdr access-control-max-age {MAX_AGE_S} "
        "hdr access-control-allow-headers %[req.fhdr(access-control-request-headers)] hdr vary origin "
        f"if {condition}"
    )
    allow = "{ var(txn.origin) -m found } !{ res.hdr(access-control-allow-origin) -m found }"
    yield f"    http-after-response add-header vary origin if {allow}"
    yield f"    http-after-response set-header access-control-expose-headers '{EXPOSED.decode()}' if {allow}"
    yield f"    http-after-response set-header access-control-allow-origin %[var(txn.origin)] if {allow}"


def _identify_caller() -> Iterator[str]:
    """Identify a token by its SHA-256, bound to its id as in `admission/accounts.py`."""
    bearer = "{ req.fhdr(authorization,1) -m reg -i '^bearer +[^ ]' }"
    pattern = "'^shl_(tok_[0-9a-z]{1,40})_([0-9a-f]{64})\\$','shoal-token\\\\x00\\\\1\\\\x00\\\\2'"
    bearer_text = "req.fhdr(authorization,1),regsub('^[A-Za-z]+ +',''),rtrim(' ')"
    digest = f"{bearer_text},regsub({pattern}),sha2(256),hex,lower"
    yield f'    http-request set-var(txn.digest) "{digest}" if {bearer}'
    yield f"    http-request set-var(txn.known) var(txn.digest),map_str({CALLERS})"
    yield f"    http-request set-var(txn.caller) var(txn.digest),concat(@,txn.backend),map_str({CALLERS})"
    yield "    acl is_known var(txn.known) -m found"
    yield "    acl is_caller var(txn.caller) -m found"
    yield "    http-request track-sc0 src table guesses if !is_public !is_known"
    yield "    http-request sc-inc-gpc0(0) if !is_public !is_known"
    guesses = ProxyRefusal(429, "limit.guesses", "too many requests without a known token", retry_s=60.0)
    yield refusal_line(guesses, f"!is_public !is_known {{ sc_gpc0_rate(0) gt {MAX_GUESSES} }}")
    unknown = ProxyRefusal(
        401, "unauthenticated", "a token that is known is needed: `Authorization: Bearer TOKEN`"
    )
    yield refusal_line(unknown, "!is_public !is_known")
    # One reply for a service that does not exist and for one that the caller may not see.
    yield refusal_line(ProxyRefusal(404, "service.unknown", "no such service"), "!is_public !is_caller")


def _guess_table() -> Iterator[str]:
    yield "backend guesses"
    yield "    stick-table type ipv6 size 10k expire 60s store gpc0,gpc0_rate(60s)"


def _headers(scheme: str) -> Iterator[str]:
    for name in STAYS_HERE:
        yield f"    http-request del-header {name}"
    yield "    http-request del-header ^x[-_](shoal|forwarded)[-_] -m reg"
    # A proxy behind HAProxy might drop headers that `Connection` names, such as the caller's name.
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
