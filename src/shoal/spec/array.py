"""Arrays: one spec submitted many times, each time with another index.

Ranges are counted before they are written out, so refusing `0..999999999` costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, PlainSerializer

from shoal.spec.error_text import show
from shoal.spec.resources import FROZEN
from shoal.spec.text import ShortForms, text_schema

MAX_ELEMENTS = 10_000
MAX_INDEX = 2**31 - 1
MAX_TEXT = 1 << 17
"""Characters: 10,000 indices of up to ten digits, each with its comma, fit."""

_PART = re.compile(r"\s*([0-9]{1,18})\s*(?:(?:-|\.\.)\s*([0-9]{1,18})\s*)?")
_INDICES_PATTERN = r"[0-9]+(?:(?:-|\.\.)[0-9]+)?(?:,[0-9]+(?:(?:-|\.\.)[0-9]+)?)*"


def _read_indices(value: object) -> object:
    """Read a count as 0..count-1, and `0-9,20..29` as its indices. A list is returned unchanged."""
    if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,18}\s*", value):
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= MAX_ELEMENTS:
            raise ValueError(f"{show(value)} elements; an array has from 1 to {MAX_ELEMENTS:,}")
        return list(range(value))
    if isinstance(value, str):
        return _spelled_out(value)
    if isinstance(value, list | tuple):
        return value
    raise ValueError(f"{show(value)} is not an array such as `0..99`, `100` or `0-99%10`")


def _spelled_out(written: str) -> list[int]:
    if len(written) > MAX_TEXT:
        raise ValueError(f"is {len(written):,} characters long; at most {MAX_TEXT:,}")
    indices: list[int] = []
    for part in written.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"{show(part)} is not an index or a range such as `0..99`")
        low = int(match[1])
        high = low if match[2] is None else int(match[2])
        if high < low:
            raise ValueError(f"{show(part)} ends below its start; write `{high}..{low}`")
        if len(indices) + high - low + 1 > MAX_ELEMENTS:
            raise ValueError(
                f"{show(written)} has more than {MAX_ELEMENTS:,} elements, the most an array has"
            )
        indices.extend(range(low, high + 1))
    return indices


def _in_order(indices: tuple[int, ...]) -> tuple[int, ...]:
    if not indices:
        raise ValueError("is empty; an array has at least one index")
    ordered = tuple(sorted(indices))
    for index, following in pairwise(ordered):
        if index == following:
            raise ValueError(f"index {show(index)} is there twice")
    return ordered


def _runs(indices: tuple[int, ...]) -> Iterator[str]:
    start = 0
    for end in range(1, len(indices) + 1):
        if end == len(indices) or indices[end] != indices[end - 1] + 1:
            low, high = indices[start], indices[end - 1]
            yield f"{low}-{high}" if high > low else f"{low}"
            start = end


def compact(indices: tuple[int, ...]) -> str:
    """`0-99,105`. A single index is written as a range, since a bare number is a count."""
    written = ",".join(_runs(indices))
    return f"{written}-{written}" if written.isdecimal() else written


Indices = Annotated[
    tuple[Annotated[int, Field(strict=True, ge=0, le=MAX_INDEX)], ...],
    Field(max_length=MAX_ELEMENTS, json_schema_extra={"minItems": 1}),
    AfterValidator(_in_order),
    PlainSerializer(compact, return_type=str, when_used="json"),
    ShortForms(
        _read_indices,
        (
            {"type": "integer", "minimum": 1, "maximum": MAX_ELEMENTS},
            text_schema(_INDICES_PATTERN, "0..99", "0-9,20-29"),
        ),
    ),
]


class ArraySpec(BaseModel):
    """`at_once`: how many elements may hold resources together; unset: all that fit."""

    model_config = FROZEN

    indices: Indices
    at_once: Annotated[int, Field(strict=True, ge=1, le=MAX_ELEMENTS)] | None = None


def _read_array(value: object) -> object:
    if isinstance(value, Mapping | ArraySpec):
        return value
    if isinstance(value, str) and "%" in value:
        indices, _, at_once = value.rpartition("%")
        if not re.fullmatch(r"\s*[0-9]{1,18}\s*", at_once):
            raise ValueError(f"{show(at_once)} after `%` is not how many may run at once; write `0-99%10`")
        full: dict[str, Any] = {"indices": _read_indices(indices), "at_once": int(at_once)}
        if not 1 <= full["at_once"] <= MAX_ELEMENTS:
            raise ValueError(f"{show(full['at_once'])} at once; from 1 to {MAX_ELEMENTS:,}")
        return full
    return {"indices": _read_indices(value)}


Array = Annotated[
    ArraySpec,
    ShortForms(
        _read_array,
        (
            {"type": "integer", "minimum": 1, "maximum": MAX_ELEMENTS},
            text_schema(rf"{_INDICES_PATTERN}(?:%[1-9][0-9]*)?", "0..99", "0-99%10"),
            {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": MAX_INDEX},
                "minItems": 1,
            },
        ),
    ),
]
