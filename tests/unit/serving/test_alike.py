"""A head that is alike to others is taken for what it would be taken for if it were the first one."""

from __future__ import annotations

import contextlib
import random

import pytest

from shoal.serving import alike
from shoal.serving.head import without_query
from shoal.serving.problem import Refused
from shoal.serving.route import Entry, Routes
from shoal.serving.service import LiveService
from shoal.serving.table import Replica, Service
from tests.support.http_cases import all_cases
from tests.support.serving import Lab, callers, get, service

TOLD = ("affinity", "caller", "cors", "digest", "has_prompt", "hedge_bytes", "hold_bytes", "is_asking",
        "is_expecting", "is_chunked", "is_head", "is_http10", "is_keep_alive", "is_safe",
        "is_websocket", "prefix")  # fmt: skip
REPLICA = Replica(replica_id="one", address="127.0.0.1:1", release=1)
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


def routes(*services: Service) -> Routes:
    return Routes({(one.project, one.name): LiveService(one) for one in services or SERVICES}, now=0.0)


def drawn(source: random.Random) -> bytes:
    """Mostly one that is taken."""
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


def said(known: Routes, raw: bytes, *, in_full: bool = False) -> tuple[object, ...]:
    try:
        found = known._read(raw) if in_full else known.recall(raw) or known.resolve(raw)
    except Refused as refused:
        return refused.status, refused.code, refused.detail, refused.must_close
    entry, query, *own = found
    account = entry.account.name if entry.account else None
    told = (getattr(entry, name) for name in TOLD)
    return entry.service.spec.name, account, entry.start + query, *told, *own


def in_full(raw: bytes) -> tuple[object, ...]:
    """As if nothing had been read before, and nothing were left out."""
    return said(routes(), raw, in_full=True)


def test_every_field_of_an_entry_is_compared() -> None:
    assert {*TOLD, "service", "account", "start"} == set(Entry.__slots__)


@pytest.mark.parametrize("seed", range(4))
def test_heads_are_read_alike_whatever_was_read_before(seed: int) -> None:
    source, warm = random.Random(seed), routes()
    found = 0
    for _ in range(1500):
        raw = drawn(source)
        bare, _ = without_query(raw)
        found += (warm._alike.shaped(bare) or warm._alike.find(bare)) is not None
        for _ in range(3):  # what comes again is learnt
            with contextlib.suppress(Refused):
                warm.resolve(raw)
        assert said(warm, raw) == in_full(raw), raw
    assert found > 150, "the short way is taken"


def test_heads_at_the_edge_of_http_are_read_alike_after_those_that_are_not() -> None:
    warm, source = routes(), random.Random(0)
    for _ in range(500):
        said(warm, drawn(source))
    for case in all_cases():
        raw = case.raw.replace(b"{path}", b"/p/s/").partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
        for line in (b"", b"X-Trace: 7\r\n", b"Content-Length: 7\r\n"):
            head, first, rest = raw.partition(b"\r\n")
            changed = head + first + line + rest
            assert said(warm, changed) == in_full(changed), changed


def test_heads_of_one_shape_are_read_alike_whatever_is_put_into_their_places() -> None:
    """Of one length, which is where nothing is split into lines."""
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
        for _ in range(5):  # seen twice, learnt, found, given a shape
            warm.resolve(
                head.format(*(f"{source.randrange(10**7, 10**8)}" for _ in range(3))).encode() + b"\r\n\r\n"
            )
    assert len(warm._alike._shapes) == 3
    for head in heads:
        for _ in range(1500):
            raw = head.format(*source.choices(values, k=3)).encode("latin-1") + b"\r\n\r\n"
            raw = raw[: raw.index(b"\r\n\r\n") + 4]
            assert said(warm, raw) == in_full(raw), raw


def test_ids_and_traces_are_each_requests_own() -> None:
    warm = routes()
    for n in range(5):
        more = (f"x-request-id: id-{n}", f"traceparent: 00-{n}-01", "accept: */*")
        entry, query, request_id, own, length = warm.resolve(
            get(f"/p/s/?{n}", *more, method="POST", body=b"x" * n)[: -n or None]
        )
        assert (query, request_id, length) == (b"?%d" % n, b"id-%d" % n, n)
        assert own == b"traceparent: 00-%d-01\r\naccept: */*\r\ncontent-length: %d\r\n" % (n, n)
        assert entry.start == b"POST /"
        assert b"trace" not in entry.prefix


def test_full_reading_is_for_the_first_three_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    warm, read = routes(), 0

    def counted(raw: bytes, query: bytes = b"", *, learns: bool = False) -> object:
        nonlocal read
        read += 1
        return type(warm)._read(warm, raw, query, learns=learns)

    monkeypatch.setattr(warm, "_read", counted)
    for n in range(10_000):
        warm.resolve(get(f"/p/s/?{n}", f"traceparent: {n}", f"x-request-id: {n}", f"idempotency-key: {n}"))
    assert read == 3
    assert len(warm._once) <= 4096


def test_what_is_remembered_is_bounded() -> None:
    warm = routes()
    for n in range(alike.MAX_KNOWN + 500):
        for _ in range(4):
            warm.resolve(get(f"/p/s/{n}", f"x-{n}: {n}"))
    known = warm._alike
    sizes = [len(known._names), len(known._lines), len(known._common), len(warm._remembered)]
    assert sizes == [alike.MAX_KNOWN] * 4, "so many would be more, and none of them begins anew"


@pytest.mark.parametrize("varying", ["/p/s/{}", "/p/s/ x-{}: 1", "/p/u/ cookie: sid={}"])
def test_what_never_recurs_takes_nobodys_place(varying: str) -> None:
    """A target, a name, or a line that decides, of its own each time."""
    warm = routes()
    for n in range(5):
        warm.resolve(get("/p/s/b", f"traceparent: {n:09}"))
    known = warm._alike
    before = [dict(one) for one in (known._names, known._lines, known._common, known._shapes)]
    for n in range(3 * alike.MAX_KNOWN):
        target, _, line = varying.format(n).partition(" ")
        warm.resolve(get(target, *filter(None, [line])))
    assert before == [known._names, known._lines, known._common, known._shapes]
    assert known.shaped(get("/p/s/b", f"traceparent: {7:09}")) is not None
    assert len(known._seen) == alike.MAX_KNOWN


def test_shapes_are_bounded_for_heads_of_every_length() -> None:
    """Of a length there may be several: with the varying value at another place, or more of them."""
    warm = routes()
    for length in range(200, 3000, 7):
        for fields in (1, 2, 16, 17):
            names = [f"x-{fields}-{n}: " for n in range(fields)]
            room = length - len(get("/p/s/", *names))
            for n in range(6):
                values = ["y" * max(1, room - fields + 1), *("z" * (fields - 1))]
                warm.resolve(
                    get(
                        "/p/s/",
                        *(name + str(n) + value[1:] for name, value in zip(names, values, strict=True)),
                    )
                )
    found = [shape for shapes in warm._alike._shapes.values() for shape in shapes]
    assert len(found) == alike.MAX_SHAPES
    assert max(len(shape._fields) for shape in found) == alike.MAX_OPEN
    assert max(warm._alike._shapes) > 2500, "new ones are taken"


def test_head_is_remembered_whole_from_the_second_time_on() -> None:
    warm, raw = routes(), get("/p/s/")
    for count in (0, 1):
        warm.resolve(raw)
        assert len(warm._remembered) == count
    assert warm.recall(raw) is not None


async def test_what_varies_reaches_the_replica_and_what_is_forged_does_not(lab: Lab) -> None:
    replica = await lab.replica()
    lab.serve(service(replica))
    wire = await lab.connect()
    for n in range(4):
        sent = get(
            "/p/s/", f"traceparent: {n}", f"x-shoal-caller: {n}", f"x-forwarded-for: 9.9.9.{n}", "cookie: a"
        )
        assert (await wire.ask(sent)).status == 200
        seen = replica.requests[-1]
        assert seen.all("traceparent") == [str(n)]
        assert seen.all("cookie") == ["a"]
        assert seen.all("x-shoal-caller") == []
        assert seen.all("x-forwarded-for") == ["127.0.0.1"]
