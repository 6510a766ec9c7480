"""Coverage-guided fuzzing of everything that reads bytes in the data plane.

    python -m tests.fuzz.framing [--seconds 60] [--seed 0]

Starts from the messages at the edge of HTTP, changes and joins them, and keeps what reaches new lines of code
in a new order. Each input must end in requests or in a refusal, the same ones however it is cut into pieces,
and leave nothing counted behind.
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
from shoal.serving.answer import BadAnswer, parse_answer
from tests.support.framing import pieces, taken
from tests.support.http_cases import all_cases

ROOM = str(Path(shoal.serving.__file__).parent)
WATCHED = frozenset(
    f"{ROOM}/{name}.py" for name in ("alike", "answer", "chunks", "downstream", "exchange", "head", "route")
)
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
    """Pairs of lines that ran one after the other in the files watched."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, int, int]] = set()
        self._new = 0

    def run(self, raw: bytes) -> tuple[Any, int]:
        """What became of the input, and how many pairs nobody had seen before."""
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
            return parse_answer(raw[: raw.find(b"\r\n\r\n") + 4])
        except BadAnswer:
            return None
    return asyncio.run(taken([raw]))


def changed(source: random.Random, corpus: list[bytes]) -> bytes:
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
    """Inputs tried, inputs kept, pairs of lines reached. Fails on the first treated unequally."""
    source = random.Random(seed)
    coverage = Coverage()
    corpus = [case.raw.replace(b"{path}", b"/p/s/") for case in all_cases() if len(case.raw) < 2000]
    corpus += ANSWERS
    for raw in corpus:
        coverage.run(raw)
    tried, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        raw = changed(source, corpus)
        tried += 1
        whole, new = coverage.run(raw)
        if new:
            corpus.append(raw)
        if isinstance(whole, tuple):
            parts = pieces(raw, [source.randrange(1 << 16) for _ in range(source.randint(1, 6))])
            cut = asyncio.run(taken(parts))
            alike = [one for one in cut[0] if one[2]] == [one for one in whole[0] if one[2]]
            assert alike, (raw, parts)
            assert cut[1][:10] == whole[1][:10], (raw, parts)
    return tried, len(corpus), len(coverage.seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    tried, kept, reached = fuzz(asked.seconds, asked.seed)
    print(f"{tried:,} inputs, {kept:,} kept for reaching something new, {reached:,} pairs of lines reached")


if __name__ == "__main__":
    main()
