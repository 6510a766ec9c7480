"""Bodies of submits, parsed and frozen. People and scripts send the same one again and again."""

from __future__ import annotations

from typing import NamedTuple

from shoal.api.bodies import decode_strictly, validate
from shoal.api.requests import SubmitBody
from shoal.control.frozen import Frozen, freeze
from shoal.spec import parse_job

MAX_KEPT = 256
MAX_KEPT_BYTES = 16 << 10
"""Of one body; larger ones are parsed every time."""


class Submission(NamedTuple):
    body: SubmitBody
    spec: Frozen


class Submissions:
    """Remembers what bodies say, byte for byte; never one that carries secrets."""

    def __init__(self) -> None:
        self._kept: dict[bytes, Submission] = {}

    def parse(self, raw: bytes) -> Submission:
        """Raises `SpecError` with every problem of the body or its spec."""
        known = self._kept.get(raw)
        if known is not None:
            return known
        body = validate(SubmitBody, decode_strictly(raw))
        parsed = Submission(body, freeze(parse_job(body.spec, source="request")))
        if len(raw) <= MAX_KEPT_BYTES and not body.secrets:
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            self._kept[raw] = parsed
        return parsed
