"""Bodies: one possible reading or a refusal, bounded in size and time."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from shoal.api.http.bodies import MAX_IDLE_S, decode_strictly, limited, validate
from shoal.api.http.problems import BadRequest, SlowRequest
from shoal.api.requests import NewToken, SubmitBody
from shoal.errors import SpecError, TooLarge

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**15), 10**15)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_what_json_can_say_is_read_as_json_does(value: Any) -> None:
    try:
        raw = json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return
    assert decode_strictly(raw) == json.loads(raw)


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused_and_never_break_anything(raw: bytes) -> None:
    with suppress(BadRequest, SpecError):
        decode_strictly(raw)


@pytest.mark.parametrize(
    "raw", [b'{"a":1,"a":1}', b"[NaN]", b"[-Infinity]", b'["\\udc00"]', b"[" + b"9" * 41 + b"]"]
)
def test_what_two_parsers_could_read_differently_is_refused(raw: bytes) -> None:
    with pytest.raises(SpecError):
        decode_strictly(raw)


@pytest.mark.parametrize("value", ["5", True, 0, -1.0, float("inf")])
def test_numbers_are_not_guessed(value: Any) -> None:
    with pytest.raises(SpecError):
        validate(NewToken, {"lifetime_s": value})


def test_every_mistake_is_reported_together() -> None:
    with pytest.raises(SpecError) as caught:
        validate(SubmitBody, {"spec": 1, "project": "UPPER", "archive": "x", "color": "red"})
    assert [problem.split("`")[1] for problem in caught.value.problems] == [
        "spec",
        "project",
        "archive",
        "color",
    ]


class Wire:
    """Pieces that arrive at given times, on a clock that only these pieces move."""

    def __init__(self, pieces: list[tuple[float, bytes]]) -> None:
        self.now = 0.0
        self._pieces = pieces

    def monotonic(self) -> float:
        return self.now

    async def receive(self) -> Message:
        if not self._pieces:
            return {"type": "http.disconnect"}
        self.now, piece = self._pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}

    def read(self, max_bytes: int | None) -> int:
        async def run() -> int:
            receive = limited(self.receive, max_bytes, self.monotonic)
            total, is_more = 0, True
            while is_more:
                message = await receive()
                total += len(message["body"])
                is_more = message["more_body"]
            return total

        return anyio.run(run)


def test_a_body_within_the_limits_passes() -> None:
    assert Wire([(0.1, b"x" * 100), (0.2, b"y" * 100)]).read(200) == 200


def test_a_body_over_the_limit_is_refused_as_soon_as_it_is() -> None:
    with pytest.raises(TooLarge):
        Wire([(0.1, b"x" * 100), (0.2, b"y" * 101)]).read(200)


def test_a_body_that_drips_is_refused() -> None:
    drip = [(second, b"x") for second in range(1, 200)]
    with pytest.raises(SlowRequest):
        Wire([(float(at), piece) for at, piece in drip]).read(None)


def test_a_large_body_on_a_slow_but_honest_line_passes() -> None:
    count = int(MAX_IDLE_S) * 3
    assert Wire([(float(at), b"x" * 4096) for at in range(count)]).read(None) == 4096 * count
