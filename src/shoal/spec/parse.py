"""Plain data to a `JobSpec`: for the SDK and the API, whose data has paths but no lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from shoal.spec.job import JobSpec
from shoal.spec.problems import Loc, sentences, spec_error
from shoal.spec.wording import show


def parse_job(data: Mapping[str, Any], source: str = "request") -> JobSpec:
    """The spec in `data`, short forms included. Raises `SpecError` with every mistake, named by path."""
    if not isinstance(data, Mapping):
        raise spec_error(source, [(0, f"{source}: a job must be a mapping with `run`, not {show(data)}")])
    try:
        return JobSpec.model_validate(dict(data))
    except ValidationError as wrong:
        prefix = f"{source}: "

        def place(_: Loc) -> tuple[int, str]:
            return 0, prefix

        raise spec_error(source, sentences(wrong, place)) from None
