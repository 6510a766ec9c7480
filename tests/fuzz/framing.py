"""Coverage-guided fuzzing of everything that reads bytes in the data plane.

    python -m tests.fuzz.framing [--seconds 60] [--seed 0]

It starts from messages at the edge of HTTP, mutates and joins them, and keeps inputs that reach new lines of
code, or lines in a new order. Each input must end in requests or in a refusal, the same for any cutting into
pieces, and must leave every counter at 0.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import shoal.serving
from shoal.serving.proxy.reply import BadProxyReply, parse_reply
from tests.support.faults.http_cases import all_cases
from tests.support.serving.framing import parse_requests, split_at

SERVING_FOLDER = str(Path(shoal.serving.__file__).parent)
WATCHED = frozenset(
    f"{SERVING_FOLDER}/{name}.py"
    for name in (
        *(
            "admission/head_templates",
            "admission/routes",
            "proxy/chunks",
            "proxy/downstream",
            "proxy/body_reader",
        ),
        *("proxy/reply", "proxy/request_head", "exchange/request_body"),
    )
)
assert all(Path(name).is_file() for name in WATCHED), WATCHED
TOKENS = (
    b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b";", b",", b"0\r\n\r\n", b"chunked", b"Host: a\r\n",
    b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"HTTP/1.1",
    b"Expect: 100-continue\r\n", b"Upgrade: websocket\r\nConnection: upgrade\r\n", b"/p/s/", b"GET ", b"\xff",
    b"?", b"#",
)  # fmt: skip
ANSWERS = (
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n",
    b"HTTP/1.0 204 No\r\n\r\n",
)


class Coverage:
    """Pairs of lines that ran one after the other in the watched files."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, int, int]] = set()
        self._new = 0

    def run(self, raw: bytes) -> tuple[Any, int]:
        """Return the result for the input, and the number of new pairs."""
        self._new = 0
        sys.settrace(self._enter)
        try:
            return outcome(raw), self._new
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if name not in WATCHED:
            return None
        last = 0

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last
            pair = (name, last, frame.f_lineno)
            last = frame.f_lineno
            if pair not in self.seen:
                self.seen.add(pair)
                self._new += 1
            return line

        return line


def outcome(raw: bytes) -> Any:
    if raw.startswith(b"HTTP/"):
        try:
            return parse_reply(raw[: raw.find(b"\r\n\r\n") + 4])
        except BadProxyReply:
            return None
    return asyncio.run(parse_requests([raw]))


def mutate(source: random.Random, corpus: list[bytes]) -> bytes:
    raw = bytearray(source.choice(corpus))
    for _ in range(source.randint(1, 4)):
        at = source.randint(0, len(raw))
        match source.randrange(6):
            case 0:
                raw[at:at] = source.choice(TOKENS)
            case 1:
                del raw[at : at + source.randint(1, 8)]
            case 2:
                raw[at : at + 1] = bytes([source.randrange(256)])
            case 3:
                raw[at:at] = source.choice(corpus)
            case 4:
                raw[at:at] = raw[at : at + source.randint(1, 40)]
            case _:
                raw += source.choice(corpus)
    return bytes(raw[:80_000])


def fuzz(seconds: float, seed: int) -> tuple[int, int, int]:
    """Return inputs tried, inputs kept, pairs of lines reached. Fails on the first input with unequal
    results.
    """

    source = random.Random(seed)
    coverage = Coverage()
    corpus = [case.raw.replace(b"{path}", b"/p/s/") for case in all_cases() if len(case.raw) < 2000]
    corpus += ANSWERS
    for raw in corpus:
        coverage.run(raw)
    tried, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        raw = mutate(source, corpus)
        tried += 1
        whole, new = coverage.run(raw)
        if new:
            corpus.append(raw)
        if isinstance(whole, tuple):
            parts = split_at(raw, [source.randrange(1 << 16) for _ in range(source.randint(1, 6))])
            cut = asyncio.run(parse_requests(parts))
            alike = [event for event in cut[0] if event[2]] == [event for event in whole[0] if event[2]]
            assert alike, (raw, parts)
            assert cut[1][:10] == whole[1][:10], (raw, parts)
    return tried, len(corpus), len(coverage.seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tried, kept, reached = fuzz(options.seconds, options.seed)
    print(f"{tried:,} inputs, {kept:,} kept for reaching something new, {reached:,} pairs of lines reached")


if __name__ == "__main__":
    main()
