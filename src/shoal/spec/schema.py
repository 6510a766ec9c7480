"""The published JSON Schemas of a job and of its flags: for editors, and for generated requests."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from shoal.spec.flags import LOC_OF
from shoal.spec.job import JobSpec
from shoal.spec.service import ServiceSpec


class _WithoutTitles(GenerateJsonSchema):
    """`title: Min` beside `min` tells nobody anything."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def job_schema() -> dict[str, Any]:
    """A new schema each time.

    What it accepts `parse_job` reads, but for what JSON Schema cannot say: that a range's ends are in
    order, that a regular expression compiles, that an amount in words is within its bounds.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **JobSpec.model_json_schema(mode="validation", schema_generator=_WithoutTitles),
        "title": "Shoal job",
    }


def service_schema() -> dict[str, Any]:
    """The same of a service, for `parse_service`."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **ServiceSpec.model_json_schema(mode="validation", schema_generator=_WithoutTitles),
        "title": "Shoal service",
    }


def flags_schema() -> dict[str, Any]:
    """A job as the flags of `shoal run`: every value the text that was typed, or a list of such texts."""
    return {
        "type": "object",
        "propertyNames": {"enum": list(LOC_OF)},
        "additionalProperties": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
        },
        "required": ["run"],
        "title": "Shoal job as flags",
    }
