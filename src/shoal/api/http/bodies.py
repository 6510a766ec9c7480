"""Request bodies: bounded, timed, and decoded once, strictly.

A body with a repeated JSON key, NaN, a lone surrogate or deep nesting is refused, not interpreted.

`SubmissionCache` keeps bodies of submits, parsed and frozen, because people and scripts send the same body
again and again.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import anyio
import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from shoal.api.http.limits import SCOPE_KEY
from shoal.api.http.problems import BadRequest, SlowRequest, WrongMediaType, describe_problem
from shoal.api.requests import SubmitBody
from shoal.control.job_specs import FrozenSpec, freeze
from shoal.errors import Bug, LimitReached, SpecError, TooLarge
from shoal.fair_threads import FairThreads
from shoal.spec import JobSpec, parse_job, spec_from_flags

MAX_IDLE_S = 20.0
"""Seconds between two pieces of a body."""
MIN_BYTES_PER_S = 1024
"""Average rate, once the first `MAX_IDLE_S` are over."""
MAX_BODY_S = 600.0
"""Time for a whole body: the largest, of 4 MiB, takes this long at 7 kB/s."""
MAX_UPLOAD_S = 4 * 3600.0
"""Time for an archive of 256 MiB, at 19 kB/s."""
MAX_INT_DIGITS = 40
MAX_SMALL = 16 << 10
MAX_MODEL = 64 << 10
"""Bytes of a body that describes an operation on one object."""
MAX_VALUES = 15_000
"""Values in a body: elements of lists and fields of objects. An array names at most 10,000 indices."""
MAX_BRACKETS = 100_000
"""Brackets in a body, including those in texts: an empty list takes two bytes there, and 56 here."""
MAX_IN_MEMORY = 8
"""Bodies of the largest size: how much one account may have in memory at once, of unanswered requests."""
MAX_PROBLEMS = 50
"""Sentences in one answer. Further problems are only counted."""


class HasPermission(Protocol):
    is_authorized: bool


Model = TypeVar("Model", bound=BaseModel)
Parsed = TypeVar("Parsed")
_threads = FairThreads(2, "shoal-api-parser")


def limited(
    receive: Receive, max_bytes: int | None, monotonic: Callable[[], float], *, is_here: bool = False
) -> Receive:
    """Wrap `receive`: raise `TooLarge` past `max_bytes`, and `SlowRequest` for a body that drips.

    `max_bytes` None: the route itself counts. After the last piece, `receive` only waits for the client to go
    away. `is_here`: the whole body has arrived, so there is nothing to time.
    """
    began: float | None = None
    total = 0
    is_over = False

    async def receive_limited() -> Message:
        nonlocal began, total, is_over
        if is_over:
            return await receive()
        began = monotonic() if began is None else began
        if is_here:
            message = await receive()
        else:
            message = await _in_time(receive, began, total, monotonic)
            longest_s = MAX_UPLOAD_S if max_bytes is None else MAX_BODY_S
            if monotonic() - began > longest_s and message.get("more_body", False):
                raise SlowRequest(
                    f"{total} bytes of the body came in {longest_s:.0f} s, the longest time allowed"
                )
        if message["type"] == "http.request":
            total += len(message.get("body", b""))
            is_over = not message.get("more_body", False)
            if max_bytes is not None and total > max_bytes:
                raise TooLarge(f"the body is larger than {max_bytes} bytes, the most this server takes")
        return message

    return receive_limited


async def _in_time(receive: Receive, began: float, total: int, monotonic: Callable[[], float]) -> Message:
    """The next piece of a body of which `total` bytes came since `began`."""
    with anyio.move_on_after(MAX_IDLE_S) as timer:
        message = await receive()
    took = monotonic() - began
    if timer.cancelled_caught or (took > MAX_IDLE_S and total < MIN_BYTES_PER_S * (took - MAX_IDLE_S)):
        raise SlowRequest(
            f"{total} bytes of the body came in {took:.0f} s; at least {MIN_BYTES_PER_S} bytes a"
            " second are expected"
        )
    return message


class BodyMemory:
    """Counts the bytes of bodies that each account has in memory, until their requests are answered."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: Counter[str] = Counter()

    @contextmanager
    def counted(self, account: str, receive: Receive) -> Iterator[Receive]:
        """Wrap `receive`: raise `LimitReached` if the account has too many bytes in memory."""
        size = 0

        async def receive_counted() -> Message:
            nonlocal size
            message = await receive()
            more = len(message.get("body", b""))
            size += more
            self._held[account] += more
            if self._held[account] > self._max_bytes:
                raise LimitReached(
                    f"your open requests hold more than {self._max_bytes} bytes",
                    hint="wait for their answers before you send more",
                )
            return message

        try:
            yield receive_counted
        finally:
            self._held[account] -= size
            if not self._held[account]:
                del self._held[account]


async def read_raw_json(
    request: Request, *, max_bytes: int | None = None, is_permitted: bool = False
) -> bytes:
    """The undecoded body of a request with a JSON media type. `TooLarge` once more bytes have come."""
    return await read_raw(request, "application/json", max_bytes=max_bytes, is_permitted=is_permitted)


async def read_raw(
    request: Request, wanted: str, *, max_bytes: int | None = None, is_permitted: bool = False
) -> bytes:
    """The body of a request whose media type is `wanted`.

    A route that reads it before its caller is authorised is a bug, unless the route sets `is_permitted` and
    takes responsibility for the bytes.
    """
    call = cast("HasPermission | None", request.scope.get(SCOPE_KEY))
    if call is not None and not (call.is_authorized or is_permitted):
        raise Bug("a route read the body of a request before it asked for permission")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != wanted:
        raise WrongMediaType(
            f"the body has the media type `{kind or 'none'}`; this route reads {wanted}",
            hint=f"send the header `Content-Type: {wanted}`",
        )
    return await _whole(request, max_bytes)


async def _whole(request: Request, max_bytes: int | None) -> bytes:
    """The body, which usually comes in one piece."""
    pieces: list[bytes] = []
    size, is_more = 0, True
    while is_more:
        message = await request.receive()
        if message["type"] != "http.request":
            raise ClientDisconnect
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if max_bytes is not None and size > max_bytes:
            raise TooLarge(f"the body has more than {max_bytes} bytes, the limit of this route")
        is_more = message.get("more_body", False)
    return b"".join(pieces)


async def read_model(request: Request, model: type[Model], *, max_bytes: int = MAX_MODEL) -> Model:
    """The body as `model`. Reports the first mistakes in it, unknown fields among them."""
    raw = await read_raw_json(request, max_bytes=max_bytes)
    return await parse_body(raw, lambda body: validate(model, decode_strictly(body)))


async def read_small_model(request: Request, model: type[Model]) -> Model:
    """The same before the permission is known, because the body decides which permission is needed."""
    raw = await read_raw_json(request, max_bytes=MAX_SMALL, is_permitted=True)
    return validate(model, decode_strictly(raw))


async def parse_body(raw: bytes, parse: Callable[[bytes], Parsed]) -> Parsed:
    """Run `parse(raw)`. A large body is parsed on a thread, in its caller's turn.

    Most of parsing holds the interpreter, so the number of values is bounded before.
    """
    if len(raw) <= MAX_MODEL:
        return parse(raw)

    def parse_large() -> Parsed:
        check_values(raw)
        return parse(raw)

    return await asyncio.wrap_future(_threads.submit(parse_large))


def check_values(raw: bytes) -> None:
    """Raise `SpecError` if the body holds more than `MAX_VALUES` values. Takes 0.1 s at most for 4 MiB."""
    if raw.count(b"[") + raw.count(b"{") > MAX_BRACKETS:
        raise SpecError(f"the body holds more than {MAX_BRACKETS:,} brackets, the limit")
    try:
        left = [msgspec.json.decode(raw)]
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return  # the parser reports the first such place
    count = 0
    while left:
        value = left.pop()
        if isinstance(value, dict | list):
            count += len(value)
            if count > MAX_VALUES:
                raise SpecError(f"the body holds more than {MAX_VALUES:,} values, the limit")
            left += value.values() if isinstance(value, dict) else value


def validate(model: type[Model], data: Any) -> Model:
    """`data` as `model`. Raises `SpecError` with the first problems, the path of each first."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        problems = tuple(describe_problem(item, model.model_fields) for item in errors[:MAX_PROBLEMS])
        raise SpecError(
            f"the request is not valid: {problems[0]}"
            + (f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""),
            problems=problems,
        ) from error


def decode_strictly(raw: bytes) -> Any:
    """JSON text as Python values. Refuses what two parsers could read differently."""
    try:
        text = raw.decode("utf-8")
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_small_int)
        if "\\u" in text:
            json.dumps(data, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise SpecError("the body is not valid UTF-8, or holds half of a surrogate pair") from error
    except RecursionError as error:
        raise SpecError("the body is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error.msg} at byte {error.pos}") from error
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise SpecError(f"the key `{_printable(twice)[:100]}` appears twice in one object")
    return mapping


def _no_constant(name: str) -> float:
    raise SpecError(f"{name} is not a JSON number")


def _small_int(digits: str) -> int:
    if len(digits) > MAX_INT_DIGITS:
        raise SpecError(f"a number of {len(digits)} digits; at most {MAX_INT_DIGITS} are read")
    return int(digits)


def _printable(text: str) -> str:
    """Text that is safe to show in a terminal and to encode."""
    return "".join(char if char.isprintable() else "?" for char in text)


MAX_KEPT = 256
MAX_KEPT_BYTES = 16 << 10
"""Bytes of one remembered body. Larger bodies are parsed every time."""


class ParsedSubmission(NamedTuple):
    body: SubmitBody
    spec: FrozenSpec
    canonical_body: bytes
    """All fields that were sent, including unknown ones, without order and white space."""


class SubmissionCache:
    """Remembers parsed bodies, byte for byte, but never a body with secrets."""

    def __init__(self) -> None:
        self._kept: dict[bytes, ParsedSubmission] = {}

    def parse(self, raw: bytes) -> ParsedSubmission:
        """Parse the body. Raises `SpecError` with every problem of the body or its spec."""
        cached = self._kept.get(raw)
        if cached is not None:
            return cached
        data = decode_strictly(raw)
        body = validate(SubmitBody, data)
        # The same job sent again counts as the same, even if another file stayed behind meanwhile.
        fields = {name: value for name, value in data.items() if name != "left_behind"}
        parsed = ParsedSubmission(body, freeze(_spec_of(body)), msgspec.json.encode(fields, order="sorted"))
        if len(raw) <= MAX_KEPT_BYTES and not body.secrets:
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            self._kept[raw] = parsed
        return parsed


def _spec_of(body: SubmitBody) -> JobSpec:
    """The job. Mistakes are named as the sender wrote them: by path, or as flags."""
    return parse_job(body.spec) if body.spec is not None else spec_from_flags(**(body.flags or {}))
