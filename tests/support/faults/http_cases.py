"""Messages at the edge of HTTP, and whether a server may take them. Hand-written ones, and families of them.

`{path}` stands for a path that is served. Each is followed on its connection by nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tests.support.serving.data_plane_lab import ClientConnection

ACCEPTED, REFUSED = "taken", "refused"


@dataclass(frozen=True)
class HttpCase:
    name: str
    raw: bytes
    verdict: str
    nginx_differs: str = ""
    """Why the reference decides otherwise; empty: it does not."""


async def verdict_of(connection: ClientConnection, raw: bytes, within_s: float) -> str:
    """Of whoever is at the other end; the connection is closed."""
    try:
        async with asyncio.timeout(within_s):
            answer = await connection.ask(raw, is_head=raw.startswith(b"HEAD"))
    except (asyncio.IncompleteReadError, ConnectionError, ValueError, TimeoutError):
        return REFUSED  # also if it waits for more: then it has not taken what was sent
    finally:
        connection.close()
    return ACCEPTED if answer.status == 200 else REFUSED


def _lines(*lines: str, body: bytes = b"", end: str = "\r\n") -> bytes:
    return (end.join(lines) + end + end).encode("latin-1") + body


def _get(*headers: str, line: str = "GET {path} HTTP/1.1", host: str = "Host: a") -> bytes:
    return _lines(line, *([host] if host else []), *headers)


def _post(*headers: str, body: bytes = b"") -> bytes:
    return _lines("POST {path} HTTP/1.1", "Host: a", *headers, body=body)


def _chunked(body: bytes, *headers: str) -> bytes:
    return _post("Transfer-Encoding: chunked", *headers, body=body)


STRICTER_LINES = {
    "double space": "GET  {path} HTTP/1.1",
    "tab for space": "GET\t{path} HTTP/1.1",
    "space after version": "GET {path} HTTP/1.1 ",
    "space in target": "GET {path}a b HTTP/1.1",
    "fragment": "GET {path}#x HTTP/1.1",
    "bytes beyond ascii in target": "GET {path}\xe9 HTTP/1.1",
    "dot segment": "GET {path}./x HTTP/1.1",
    "two dots within": "GET {path}x/../y HTTP/1.1",
    "encoded dots": "GET {path}%2e%2e/y HTTP/1.1",
    "half encoded dots": "GET {path}.%2E/y HTTP/1.1",
    "encoded slash after dots": "GET {path}..%2fy HTTP/1.1",
    "dots and a parameter": "GET {path}..;/y HTTP/1.1",
    "backslash after dots": "GET {path}..\\y HTTP/1.1",
    "unknown method": "BREW {path} HTTP/1.1",
}
ACCEPTED_LINES = {
    "plain": "GET {path} HTTP/1.1",
    "query": "GET {path}?a=b&c=d HTTP/1.1",
    "query with slashes and dots": "GET {path}?a=/../b HTTP/1.1",
    "double slash inside": "GET {path}a//b HTTP/1.1",
    "encoded": "GET {path}a%20b HTTP/1.1",
    "dots in a name": "GET {path}a..b/.well HTTP/1.1",
    "absolute": "GET http://a{path} HTTP/1.1",
    "head": "HEAD {path} HTTP/1.1",
    "delete": "DELETE {path} HTTP/1.1",
    "options": "OPTIONS {path} HTTP/1.1",
    "long query": "GET {path}?" + "x" * 4000 + " HTTP/1.1",
}


def request_lines() -> list[HttpCase]:
    refused = {
        "no version": "GET {path}",
        "version 0.9": "GET {path} HTTP/0.9",
        "version 1.2 without minor": "GET {path} HTTP/1",
        "version 2.0": "GET {path} HTTP/2.0",
        "version 3.0": "GET {path} HTTP/3.0",
        "version of two digits": "GET {path} HTTP/1.10",
        "version in letters": "GET {path} HTTP/a.b",
        "lower case protocol": "GET {path} http/1.1",
        "another protocol": "GET {path} RTSP/1.0",
        "ice protocol": "SOURCE {path} ICE/1.0",
        "trailing words": "GET {path} HTTP/1.1 x",
        "lower case method": "get {path} HTTP/1.1",
        "method with a digit": "GE7 {path} HTTP/1.1",
        "method with a colon": "GET: {path} HTTP/1.1",
        "no method": "{path} HTTP/1.1",
        "leading space": " GET {path} HTTP/1.1",
        "no target": "GET HTTP/1.1",
        "target without slash": "GET p/s/ HTTP/1.1",
        "nul in target": "GET {path}\0 HTTP/1.1",
        "control in target": "GET {path}\x01 HTTP/1.1",
        "delete in target": "GET {path}\x7f HTTP/1.1",
        "vertical tab for space": "GET\x0b{path} HTTP/1.1",
        "connect": "CONNECT a:80 HTTP/1.1",
        "trace": "TRACE {path} HTTP/1.1",
        "asterisk with get": "GET * HTTP/1.1",
        "path that leaves its root": "GET {path}../../../x HTTP/1.1",
        "absolute with a foreign host": "GET http://b{path} HTTP/1.1",
        "absolute with a user": "GET http://u@a{path} HTTP/1.1",
        "absolute with another scheme": "GET ftp://a{path} HTTP/1.1",
        "absolute without a host": "GET http://{path} HTTP/1.1",
    }
    differs = {
        "no version": "it still answers HTTP/0.9 by closing",
        "method with a digit": "it leaves unknown methods to what is behind it",
        "absolute with a foreign host": "it lets the target overrule Host",
        "absolute with a user": "it ignores the user",
        "absolute with another scheme": "it knows any scheme",
        "version of two digits": "it reads 1.10 as a later 1.x",
    }
    return [
        *(HttpCase(f"line: {n}", _get(line=x), REFUSED, differs.get(n, "")) for n, x in refused.items()),
        *(
            HttpCase(f"line: {n}", _get(line=x), REFUSED, "we are stricter")
            for n, x in STRICTER_LINES.items()
        ),
        *(HttpCase(f"line: {n}", _get(line=x), ACCEPTED) for n, x in ACCEPTED_LINES.items()),
    ]


def line_ends() -> list[HttpCase]:
    lf = "we are stricter: a bare line feed means one thing to some readers and another to others"
    return [
        HttpCase("ends: bare line feeds", _lines("GET {path} HTTP/1.1", "Host: a", end="\n"), REFUSED, lf),
        HttpCase(
            "ends: line feed after the request line", b"GET {path} HTTP/1.1\nHost: a\r\n\r\n", REFUSED, lf
        ),
        HttpCase(
            "ends: line feed after a header", b"GET {path} HTTP/1.1\r\nHost: a\nX: y\r\n\r\n", REFUSED, lf
        ),
        HttpCase("ends: line feed for the empty line", b"GET {path} HTTP/1.1\r\nHost: a\r\n\n", REFUSED, lf),
        HttpCase("ends: carriage return alone", b"GET {path} HTTP/1.1\rHost: a\r\r", REFUSED),
        HttpCase(
            "ends: carriage return in a value",
            b"GET {path} HTTP/1.1\r\nHost: a\r\nX: y\rZ: 1\r\n\r\n",
            REFUSED,
        ),
        HttpCase(
            "ends: doubled carriage return", b"GET {path} HTTP/1.1\r\nHost: a\r\nX: y\r\r\n\r\n", REFUSED, lf
        ),
        HttpCase("ends: an empty line before", b"\r\nGET {path} HTTP/1.1\r\nHost: a\r\n\r\n", ACCEPTED),
        HttpCase("ends: folded header", _get("X: a\r\n b"), REFUSED),
        HttpCase("ends: folded with a tab", _get("X: a\r\n\tb"), REFUSED),
        HttpCase("ends: folded first line", b"GET {path} HTTP/1.1\r\n Host: a\r\n\r\n", REFUSED),
    ]


def header_names() -> list[HttpCase]:
    cases = [
        HttpCase("name: space before the colon", _get("X : y"), REFUSED),
        HttpCase("name: tab before the colon", _get("X\t: y"), REFUSED),
        HttpCase("name: space within", _get("X Y: z"), REFUSED),
        HttpCase("name: empty", _get(": y"), REFUSED),
        HttpCase("name: no colon", _get("X"), REFUSED, "it drops the line"),
        HttpCase("name: only a space", _get(" : y"), REFUSED),
        HttpCase("host: missing", _get(host=""), REFUSED),
        HttpCase("host: space before the colon", _get(host="Host : a"), REFUSED),
        HttpCase("host: twice the same", _get("Host: a"), REFUSED),
        HttpCase("host: two of them", _get("Host: b"), REFUSED),
        HttpCase("host: empty", _get(host="Host:"), REFUSED, "it takes any host here"),
        HttpCase("host: a path", _get(host="Host: a/b"), REFUSED),
        HttpCase("host: with a space", _get(host="Host: a b"), REFUSED),
        HttpCase("host: two in one", _get(host="Host: a, b"), REFUSED, "it reads up to what is no host"),
        HttpCase("host: a user", _get(host="Host: u@a"), REFUSED, "it takes any host here"),
        HttpCase("host: port in letters", _get(host="Host: a:b"), REFUSED, "it does not read the port"),
        HttpCase(
            "host: port of six digits", _get(host="Host: a:123456"), REFUSED, "it does not read the port"
        ),
        HttpCase("host: with a port", _get(host="Host: a:80"), ACCEPTED),
        HttpCase("host: in version 1.0 none is needed", b"GET {path} HTTP/1.0\r\n\r\n", ACCEPTED),
        HttpCase("host: upper case", _get(host="HOST: A"), ACCEPTED),
        HttpCase("host: ipv6", _get(host="Host: [::1]:80"), ACCEPTED),
        HttpCase("name: any case", _get("x-AbC: y"), ACCEPTED),
        HttpCase("name: token characters", _get("x!#$%&'*+-.^`|~9: y"), ACCEPTED),
        HttpCase("value: empty", _get("X:"), ACCEPTED),
        HttpCase("value: padded", _get("X:  \t y \t "), ACCEPTED),
        HttpCase("value: beyond ascii", _get("X: \xe9\xff"), ACCEPTED),
        HttpCase("value: nul", _get("X: a\0b"), REFUSED),
        HttpCase("value: long", _get("X: " + "y" * 4000), ACCEPTED),
    ]
    dropped = "it drops what is no name instead"
    cases += [
        HttpCase(f"name: with {ord(odd):#04x}", _get(f"X{odd}Y: z"), REFUSED, "" if odd < " " else dropped)
        for odd in map(chr, b'\x01\x02\x03\x04\x05\x06\x07\x08\x0b\x0c\x0e\x0f\x1b\x1f"(),/;<=>?@[\\]{}\x7f')
    ]
    cases += [
        HttpCase(
            f"value: with {ord(odd):#04x}", _get(f"X: a{odd}b"), REFUSED, "it passes control characters on"
        )
        for odd in map(chr, b"\x01\x02\x07\x08\x0b\x0c\x0e\x1b\x1f\x7f")
    ]
    return cases


def lengths() -> list[HttpCase]:
    cases = [
        HttpCase("length: exact", _post("Content-Length: 3", body=b"abc"), ACCEPTED),
        HttpCase("length: zero", _post("Content-Length: 0"), ACCEPTED),
        HttpCase("length: leading zeros", _post("Content-Length: 0003", body=b"abc"), ACCEPTED),
        HttpCase("length: padded", _post("Content-Length:   3  ", body=b"abc"), ACCEPTED),
        HttpCase("length: of get", _get("Content-Length: 3") + b"abc", ACCEPTED),
        HttpCase("length: none for post", _post(), ACCEPTED),
        HttpCase(
            "length: twice the same", _post("Content-Length: 3", "Content-Length: 3", body=b"abc"), REFUSED
        ),
        HttpCase(
            "length: two different", _post("Content-Length: 3", "Content-Length: 4", body=b"abcd"), REFUSED
        ),
        HttpCase("length: beside chunks", _chunked(b"3\r\nabc\r\n0\r\n\r\n", "Content-Length: 3"), REFUSED),
        HttpCase(
            "length: before chunks",
            _post("Content-Length: 3", "Transfer-Encoding: chunked", body=b"abc"),
            REFUSED,
        ),
    ]
    bad = [
        "-3",
        "+3",
        "3.0",
        "0x3",
        "3a",
        "a",
        "3,3",
        "3, 3",
        "3 3",
        "3;",
        '"3"',
        "1e1",
        "_3",
        "3_0",
        "٣".encode().decode("latin-1"),
        "9" * 19,
        "9" * 40,
    ]
    cases += [
        HttpCase(f"length: {text[:24]!r}", _post(f"Content-Length: {text}", body=b"abc"), REFUSED)
        for text in bad
    ]
    cases.append(HttpCase("length: empty", _post("Content-Length:", body=b""), REFUSED))
    return cases


def codings() -> list[HttpCase]:
    whole = b"3\r\nabc\r\n0\r\n\r\n"
    cases = [
        HttpCase("coding: chunked", _chunked(whole), ACCEPTED),
        HttpCase("coding: in capitals", _post("Transfer-Encoding: CHUNKED", body=whole), ACCEPTED),
        HttpCase("coding: padded", _post("Transfer-Encoding:  chunked ", body=whole), ACCEPTED),
        HttpCase(
            "coding: in version 1.0",
            _lines("POST {path} HTTP/1.0", "Transfer-Encoding: chunked", body=whole),
            REFUSED,
        ),
        HttpCase("coding: twice", _chunked(whole, "Transfer-Encoding: chunked"), REFUSED),
        HttpCase("coding: and identity", _chunked(whole, "Transfer-Encoding: identity"), REFUSED),
        HttpCase("coding: space before the colon", _post("Transfer-Encoding : chunked", body=whole), REFUSED),
        HttpCase("coding: folded", _post("Transfer-Encoding:\r\n chunked", body=whole), REFUSED),
    ]
    listed = ("gzip, chunked", "chunked, gzip", "chunked, chunked", "chunked,", ",chunked")
    named = ("gzip", "identity", "xchunked", "chunkedx", "chunk", "chunked;q=1", '"chunked"', "x", "cow")
    bad = (*listed, *named, "ch\x01unked", "chunked\x0b", "\x0bchunked")
    cases += [
        HttpCase(f"coding: {text!r}", _post(f"Transfer-Encoding: {text}", body=whole), REFUSED)
        for text in bad
    ]
    return cases


def chunk_sizes() -> list[HttpCase]:
    end = b"0\r\n\r\n"
    taken = {
        "one": b"3\r\nabc\r\n" + end,
        "two": b"3\r\nabc\r\n2\r\nde\r\n" + end,
        "none": end,
        "capital hex": b"A\r\n0123456789\r\n" + end,
        "leading zeros": b"0003\r\nabc\r\n" + end,
        "extension": b"3;a=b\r\nabc\r\n" + end,
        "extension with a quoted value": b'3;a="b c"\r\nabc\r\n' + end,
        "trailer": b"3\r\nabc\r\n0\r\nX: y\r\n\r\n",
        "many zeros at the end": b"3\r\nabc\r\n000\r\n\r\n",
    }
    refused = {
        "prefix 0x": b"0x3\r\nabc\r\n" + end,
        "sign": b"+3\r\nabc\r\n" + end,
        "minus": b"-3\r\nabc\r\n" + end,
        "no digit": b"\r\nabc\r\n" + end,
        "no hex": b"g\r\nabc\r\n" + end,
        "underscore": b"0_3\r\nabc\r\n" + end,
        "leading space": b" 3\r\nabc\r\n" + end,
        "longer than it says": b"3\r\nabcd\r\n" + end,
        "no line end after": b"3\r\nabc2\r\nde\r\n" + end,
        "two other bytes for the line end": b"3\r\nabcXX" + end,
        "seventeen digits": b"1" * 17 + b"\r\nabc\r\n" + end,
        "quotient of an overflow": b"10000000000000003\r\nabc\r\n" + end,
        "comma": b"3,3\r\nabc\r\n" + end,
        "nul after": b"3\0\r\nabc\r\n" + end,
    }
    stricter = {
        "shorter than it says": b"4\r\nabc\r\n" + end,
        "line feed after the size": b"3\nabc\r\n" + end,
        "line feed after the data": b"3\r\nabc\n" + end,
        "carriage return after the size": b"3\rabc\r\n" + end,
        "line feed in an extension": b"3;a\nb\r\nabc\r\n" + end,
        "space after the size": b"3 \r\nabc\r\n" + end,
        "control in an extension": b"3;a\x01\r\nabc\r\n" + end,
        "endless extension": b"3;" + b"a" * 1000 + b"\r\nabc\r\n" + end,
        "folded trailer": b"0\r\nX: y\r\n z\r\n\r\n",
        "trailer without a colon": b"0\r\nX\r\n\r\n",
        "trailer with a space before the colon": b"0\r\nX : y\r\n\r\n",
        "line feed after a trailer": b"0\r\nX: y\n\r\n\r\n",
    }
    return [
        *(HttpCase(f"chunk: {n}", _chunked(body), ACCEPTED) for n, body in taken.items()),
        *(HttpCase(f"chunk: {n}", _chunked(body), REFUSED) for n, body in refused.items()),
        *(
            HttpCase(f"chunk: {n}", _chunked(body), REFUSED, "we are stricter")
            for n, body in stricter.items()
        ),
    ]


def sizes() -> list[HttpCase]:
    return [
        HttpCase("size: a head of 40 KB", _get("X: " + "y" * 40_000), REFUSED),
        HttpCase("size: a target of 20 KB", _get(line="GET {path}?" + "x" * 20_000 + " HTTP/1.1"), REFUSED),
        HttpCase(
            "size: 101 headers", _get(*(f"X-{n}: y" for n in range(100))), REFUSED, "it bounds bytes alone"
        ),
        HttpCase("size: 90 headers", _get(*(f"X-{n}: y" for n in range(89))), ACCEPTED),
        HttpCase(
            "expect: something else", _post("Expect: 200-ok", "Content-Length: 0"), REFUSED, "it ignores it"
        ),
    ]


def all_cases() -> list[HttpCase]:
    families = (request_lines, line_ends, header_names, lengths, codings, chunk_sizes, sizes)
    return [case for family in families for case in family()]
