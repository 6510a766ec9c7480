"""Frozen specs, and what follows from them: worked out once, looked at again and again."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from shoal.model.from_spec import request_of, retry_of
from shoal.model.job import Job, RetryPolicy
from shoal.model.request import Request
from shoal.spec import JobSpec


class Frozen(msgspec.Struct, frozen=True):
    """A spec as it will be recorded. Equal submissions may share one."""

    spec: JobSpec
    text: str
    """Its canonical JSON."""
    request: Request
    retry: RetryPolicy


def freeze(spec: JobSpec | Frozen) -> Frozen:
    """What is frozen already stays as it is."""
    if isinstance(spec, Frozen):
        return spec
    return Frozen(spec, spec.canonical_json(), request_of(spec), retry_of(spec))


def spec_of(job: Job) -> JobSpec:
    """The job's spec. Frozen, so sharing one object is safe."""
    return _parsed(job.spec_json)


@lru_cache(maxsize=4096)
def _parsed(spec_json: str) -> JobSpec:
    return JobSpec.model_validate_json(spec_json)
