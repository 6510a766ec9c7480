"""The spec behind a job, parsed once: loops look at the same frozen specs again and again."""

from __future__ import annotations

from functools import lru_cache

from shoal.model.job import Job
from shoal.spec import JobSpec


def spec_of(job: Job) -> JobSpec:
    """The job's spec. Frozen, so sharing one object is safe."""
    return _parsed(job.spec_json)


@lru_cache(maxsize=4096)
def _parsed(spec_json: str) -> JobSpec:
    return JobSpec.model_validate_json(spec_json)
