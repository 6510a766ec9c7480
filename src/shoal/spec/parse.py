"""Plain data to a `JobSpec` or a `ServiceSpec`: for SDK and API, whose data has paths but no lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from shoal.spec.job import JobSpec
from shoal.spec.problems import JOB_MODELS, SERVICE_MODELS, Loc, Models, sentences, spec_error
from shoal.spec.service import ServiceSpec
from shoal.spec.wording import show

Spec = TypeVar("Spec", JobSpec, ServiceSpec)


def parse_job(data: Mapping[str, Any], source: str = "request") -> JobSpec:
    """The spec in `data`, short forms included. Raises `SpecError` with every mistake, named by path."""
    return _parsed(data, source, JobSpec, JOB_MODELS)


def parse_service(data: Mapping[str, Any], source: str = "request") -> ServiceSpec:
    """The same for a service."""
    return _parsed(data, source, ServiceSpec, SERVICE_MODELS)


def _parsed(data: Mapping[str, Any], source: str, model: type[Spec], models: Models) -> Spec:
    if not isinstance(data, Mapping):
        what = "job" if model is JobSpec else "service"
        raise spec_error(
            source, [(0, f"{source}: a {what} must be a mapping with `run`, not {show(data)}")], models
        )
    try:
        return model.model_validate(dict(data))
    except ValidationError as wrong:
        prefix = f"{source}: "

        def place(_: Loc) -> tuple[int, str]:
            return 0, prefix

        raise spec_error(source, sentences(wrong, place, models=models), models) from None
