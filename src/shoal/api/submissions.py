"""Bodies of submits, parsed and frozen. People and scripts send the same one again and again."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from shoal.api.bodies import decode_strictly, validate
from shoal.api.requests import SubmitBody
from shoal.control.frozen import Frozen, freeze
from shoal.spec import JobSpec, parse_job, spec_from_flags

MAX_KEPT = 256
MAX_KEPT_BYTES = 16 << 10
"""Of one body; larger ones are parsed every time."""


class Submission(NamedTuple):
    body: SubmitBody
    spec: Frozen
    said: bytes
    """All that was sent, whatever we understood of it, but for order and white space."""


class Submissions:
    """Remembers what bodies say, byte for byte; never one that carries secrets."""

    def __init__(self) -> None:
        self._kept: dict[bytes, Submission] = {}

    def parse(self, raw: bytes) -> Submission:
        """Raises `SpecError` with every problem of the body or its spec."""
        known = self._kept.get(raw)
        if known is not None:
            return known
        data = decode_strictly(raw)
        body = validate(SubmitBody, data)
        # The same job sent again is the same, also where a file has come to those that do not travel.
        asked = {name: value for name, value in data.items() if name != "left_behind"}
        parsed = Submission(body, freeze(_spec_of(body)), msgspec.json.encode(asked, order="sorted"))
        if len(raw) <= MAX_KEPT_BYTES and not body.secrets:
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            self._kept[raw] = parsed
        return parsed


def _spec_of(body: SubmitBody) -> JobSpec:
    """The job. Mistakes are named as the sender wrote it: by path, or as flags."""
    return parse_job(body.spec) if body.spec is not None else spec_from_flags(**(body.flags or {}))
