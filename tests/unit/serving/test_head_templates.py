"""A head that matches a template is read exactly as if it were the first one."""

from __future__ import annotations

import contextlib
import random

import pytest

from shoal.serving.admission import head_templates
from shoal.serving.admission.routes import RouteEntry, ServiceRoutes
from shoal.serving.balance.service import LiveService
from shoal.serving.proxy.local_reply import ProxyRefusal
from shoal.serving.proxy.request_head import without_query
from shoal.serving.table import ReplicaConfig, ServiceConfig
from tests.support.faults.http_cases import all_cases
from tests.support.serving.data_plane_lab import EmbeddedLab, callers, request_bytes, service

TOLD = ("affinity", "caller", "cors", "digest", "has_prompt", "hedge_bytes", "hold_bytes", "is_asking",
        "is_expecting", "is_chunked", "is_head", "is_http10", "is_keep_alive", "is_safe",
        "is_websocket", "prefix")  # fmt: skip
REPLICA = ReplicaConfig(replica_id="one", address="127.0.0.1:1", release=1)
OPEN = service(REPLICA, hedge_s=0.1)
CLOSED = service(
    REPLICA,
    name="t",
    is_public=False,
    callers=callers("ana", "bo"),
    affinity="header:x-session",
    origins=("https://a",),
)
BY_COOKIE = service(REPLICA, name="u", affinity="cookie:sid", closed=frozenset({"sleep"}))
BY_ID = service(REPLICA, name="v", affinity="header:x-request-id")
SERVICES = (OPEN, CLOSED, BY_COOKIE, BY_ID)

FIRST = (
    "GET /p/s/ HTTP/1.1", "GET /p/s/ HTTP/1.0", "HEAD /p/s/a HTTP/1.1", "POST /p/t/x HTTP/1.1",
    "POST /p/s/v1/completions HTTP/1.1", "GET /p/u/ HTTP/1.1", "GET /p/u/sleep HTTP/1.1",
    "GET /p/v/ HTTP/1.1", "GET /p/s/?q={r} HTTP/1.1", "POST /p/t/x?{r} HTTP/1.1", "GET /p/s? HTTP/1.1",
    "GET /p/none/ HTTP/1.1", "GET /p/s/../t HTTP/1.1", "GET /p/none?{r} HTTP/1.1", "GET /p/s/..?{r} HTTP/1.1",
    "GET /p/s/?{r}#a HTTP/1.1", "GET /p/s/#a?{r} HTTP/1.1", "GET /p/s/?{r}?/../ HTTP/1.1",
    "GET /p/s/?{r} a HTTP/1.1", "GET /p/s/?\xff{r} HTTP/1.1", "GET /p/s/?{r}\x00 HTTP/1.1",
    "GET /p/s/?{r}\tHTTP/1.1", "GET /p/s/?{r} HTTP/1.2", "GET ?{r} HTTP/1.1", "GET http://a?{r} HTTP/1.1",
    "GET http://a/p/s/?{r} HTTP/1.1", "GET http://b/p/s/?{r} HTTP/1.1", "GET /p/u/sleep?{r} HTTP/1.1",
    "POST /p/s/v1/completions?{r} HTTP/1.1", "CONNECT a?{r} HTTP/1.1", "OPTIONS *?{r} HTTP/1.1",
)  # fmt: skip
LINES = (
    "Host: a", "host: b", "Host:", "Content-Length: {n}", "content-length: {n}", "Content-Length: +{n}",
    "Content-Length:{n} ", "Transfer-Encoding: chunked", "Connection: close", "connection: keep-alive",
    "Connection: x-trace", "Connection: close, close", "Close: 1", "X-Trace: {r}", "x-trace:{r}\t",
    "traceparent: 00-{r}-01", "X-Request-Id: {r}", "x-request-id: not decent {r}", "x_request_id: {r}",
    "Idempotency-Key: {r}", "idempotency-key:", "Authorization: Bearer token-ana",
    "authorization: Bearer token-bo", "Authorization: Bearer token-{r}", "X-Session: {n}", "Cookie: sid={n}",
    "Cookie: a=b; sid={n}; c=d", "X-Shoal-Caller: eve", "x_forwarded_for: 1", "Forwarded: for=1",
    "Origin: https://a", "origin: https://b",
    "TE: trailers", "Expect: 100-continue", "Upgrade: websocket", "Connection: upgrade", "X-Bad: {r}\x00",
    "X-Bad: {r}\x7f", "X-Bad : {r}", ": {r}", "X-Trace", " X-Trace: {r}", "X-Trace: a\rb", "X-Trace: a\nb",
    "X-Trace: \xff{r}",
    "Keep-Alive: {n}", "Proxy-Connection: close", "Proxy-Authorization: x", "X-Long: " + "y" * 400,
)  # fmt: skip


def routes(*services: ServiceConfig) -> ServiceRoutes:
    return ServiceRoutes(
        {(config.project, config.name): LiveService(config) for config in services or SERVICES}, now=0.0
    )


def drawn(source: random.Random) -> bytes:
    """Draw a random head; most of them are accepted."""
    lines = [source.choice(FIRST[:11] if source.random() < 0.9 else FIRST)]
    if source.random() < 0.9:
        lines += ["Host: a", "Authorization: Bearer token-ana"]
    lines += source.choices(LINES, k=source.randint(0, 4))
    source.shuffle(rest := lines[1:])
    text = "\r\n".join([lines[0], *rest])
    for _ in range(8):
        text = text.replace("{n}", str(source.randrange(3) * 40_000), 1)
        text = text.replace("{r}", f"{source.getrandbits(32):x}", 1)
    return text.encode("latin-1") + b"\r\n\r\n"


def resolved(table: ServiceRoutes, raw: bytes, *, in_full: bool = False) -> tuple[object, ...]:
    try:
        request = table._read(raw) if in_full else table.recall(raw) or table.resolve(raw)
    except ProxyRefusal as refused:
        return refused.status, refused.code, refused.detail, refused.must_close
    entry, query, *rest = request
    account = entry.account.name if entry.account else None
    values = (getattr(entry, name) for name in TOLD)
    return entry.service.spec.name, account, entry.start + query, *values, *rest


def in_full(raw: bytes) -> tuple[object, ...]:
    """Read the head as if no head had been read before, and without any shortcut."""
    return resolved(routes(), raw, in_full=True)


def test_every_field_of_an_entry_is_compared() -> None:
    assert {*TOLD, "service", "account", "start"} == set(RouteEntry.__slots__)


@pytest.mark.parametrize("seed", range(4))
def test_heads_are_read_the_same_whatever_was_read_before(seed: int) -> None:
    source, warm = random.Random(seed), routes()
    num_matched = 0
    for _ in range(1500):
        raw = drawn(source)
        bare, _ = without_query(raw)
        num_matched += (warm._templates.match(bare) or warm._templates.find(bare)) is not None
        for _ in range(3):  # a head that comes again is learnt
            with contextlib.suppress(ProxyRefusal):
                warm.resolve(raw)
        assert resolved(warm, raw) == in_full(raw), raw
    assert num_matched > 150, "the short way is taken"


def test_edge_case_heads_are_read_the_same_after_ordinary_ones() -> None:
    warm, source = routes(), random.Random(0)
    for _ in range(500):
        resolved(warm, drawn(source))
    for case in all_cases():
        raw = case.raw.replace(b"{path}", b"/p/s/").partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
        for line in (b"", b"X-Trace: 7\r\n", b"Content-Length: 7\r\n"):
            head, first, rest = raw.partition(b"\r\n")
            changed = head + first + line + rest
            assert resolved(warm, changed) == in_full(changed), changed


def test_heads_of_one_template_are_read_the_same_with_any_values() -> None:
    """Heads of one length take the path that splits no lines."""
    heads = [
        "GET /p/s/ HTTP/1.1\r\nHost: a\r\nX-T: {}\r\nB: c\r\nX-Request-Id: {}\r\nTrace:\t{} \r\nX-T: x",
        "POST /p/s/ HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\nx-a: {}\r\nx-forwarded-for: {}",
        "PUT /p/s/ HTTP/1.1\r\nX: {}\r\nTransfer-Encoding: chunked\r\nHost: a\r\nIdempotency-Key: {}\r\nC:{}",
    ]
    values = ["abcd1234", "00000017", "12345678", "a-b-c-d-", "        ", " bcd1234", "abcd123 ", "abc 1234"]
    values += [
        "a\r\nb: cd",
        "abcd\r\n\r\n",
        "\r\nabcd: ",
        "abc\x001234",
        "abcd\n123",
        "ab\r12345",
        "abcd\xff234",
    ]
    values += ["+1234567", "\tbcd1234", "a:b:c:d:", "********"]
    warm, source = routes(), random.Random(0)
    for head in heads:
        for _ in range(5):  # seen twice, learnt, found, made a template
            warm.resolve(
                head.format(*(f"{source.randrange(10**7, 10**8)}" for _ in range(3))).encode() + b"\r\n\r\n"
            )
    assert len(warm._templates._templates) == 3
    for head in heads:
        for _ in range(1500):
            raw = head.format(*source.choices(values, k=3)).encode("latin-1") + b"\r\n\r\n"
            raw = raw[: raw.index(b"\r\n\r\n") + 4]
            assert resolved(warm, raw) == in_full(raw), raw


def test_request_ids_and_traces_are_never_shared() -> None:
    warm = routes()
    for n in range(5):
        more = (f"x-request-id: id-{n}", f"traceparent: 00-{n}-01", "accept: */*")
        entry, query, request_id, headers, length = warm.resolve(
            request_bytes(f"/p/s/?{n}", *more, method="POST", body=b"x" * n)[: -n or None]
        )
        assert (query, request_id, length) == (b"?%d" % n, b"id-%d" % n, n)
        assert headers == b"traceparent: 00-%d-01\r\naccept: */*\r\ncontent-length: %d\r\n" % (n, n)
        assert entry.start == b"POST /"
        assert b"trace" not in entry.prefix


def test_only_the_first_three_of_many_alike_heads_are_parsed_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    warm, read = routes(), 0

    def counted(raw: bytes, query: bytes = b"", *, learns: bool = False) -> object:
        nonlocal read
        read += 1
        return type(warm)._read(warm, raw, query, learns=learns)

    monkeypatch.setattr(warm, "_read", counted)
    for n in range(10_000):
        warm.resolve(
            request_bytes(f"/p/s/?{n}", f"traceparent: {n}", f"x-request-id: {n}", f"idempotency-key: {n}")
        )
    assert read == 3
    assert len(warm._seen_once) <= 4096


def test_remembered_heads_and_lines_are_bounded() -> None:
    warm = routes()
    for n in range(head_templates.MAX_KNOWN + 500):
        for _ in range(4):
            warm.resolve(request_bytes(f"/p/s/{n}", f"x-{n}: {n}"))
    templates = warm._templates
    sizes = [len(templates._names), len(templates._lines), len(templates._common), len(warm._remembered)]
    assert sizes == [head_templates.MAX_KNOWN] * 4, "so many would be more, and none of them begins anew"


@pytest.mark.parametrize("varying", ["/p/s/{}", "/p/s/ x-{}: 1", "/p/u/ cookie: sid={}"])
def test_heads_that_never_recur_displace_nothing(varying: str) -> None:
    """The varying part is a target, a header name, or a line that decides; each time a new one."""
    warm = routes()
    for n in range(5):
        warm.resolve(request_bytes("/p/s/b", f"traceparent: {n:09}"))
    templates = warm._templates
    before = [
        dict(entries)
        for entries in (templates._names, templates._lines, templates._common, templates._templates)
    ]
    for n in range(3 * head_templates.MAX_KNOWN):
        target, _, line = varying.format(n).partition(" ")
        warm.resolve(request_bytes(target, *filter(None, [line])))
    assert before == [templates._names, templates._lines, templates._common, templates._templates]
    assert templates.match(request_bytes("/p/s/b", f"traceparent: {7:09}")) is not None
    assert len(templates._seen) == head_templates.MAX_KNOWN


def test_templates_are_bounded_for_heads_of_every_length() -> None:
    """There may be several for one length: with the varying value at another place, or more of them."""
    warm = routes()
    for length in range(200, 3000, 7):
        for fields in (1, 2, 16, 17):
            names = [f"x-{fields}-{n}: " for n in range(fields)]
            room = length - len(request_bytes("/p/s/", *names))
            for n in range(6):
                values = ["y" * max(1, room - fields + 1), *("z" * (fields - 1))]
                warm.resolve(
                    request_bytes(
                        "/p/s/",
                        *(name + str(n) + value[1:] for name, value in zip(names, values, strict=True)),
                    )
                )
    templates = [shape for shapes in warm._templates._templates.values() for shape in shapes]
    assert len(templates) == head_templates.MAX_TEMPLATES
    assert max(len(shape._fields) for shape in templates) == head_templates.MAX_OPEN
    assert max(warm._templates._templates) > 2500, "new ones are taken"


def test_head_is_remembered_whole_from_the_second_time_on() -> None:
    warm, raw = routes(), request_bytes("/p/s/")
    for count in (0, 1):
        warm.resolve(raw)
        assert len(warm._remembered) == count
    assert warm.recall(raw) is not None


async def test_varying_headers_reach_the_replica_and_forged_ones_do_not(lab: EmbeddedLab) -> None:
    replica = await lab.add_replica()
    lab.serve(service(replica))
    wire = await lab.connect()
    for n in range(4):
        sent = request_bytes(
            "/p/s/", f"traceparent: {n}", f"x-shoal-caller: {n}", f"x-forwarded-for: 9.9.9.{n}", "cookie: a"
        )
        assert (await wire.ask(sent)).status == 200
        seen = replica.requests[-1]
        assert seen.values("traceparent") == [str(n)]
        assert seen.values("cookie") == ["a"]
        assert seen.values("x-shoal-caller") == []
        assert seen.values("x-forwarded-for") == ["127.0.0.1"]
