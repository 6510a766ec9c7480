"""The published JSON Schema of a job, short forms included: for editors, and for generated requests."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from shoal.spec.job import JobSpec


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
