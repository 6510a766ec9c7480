"""The error texts people see, whole: a change of words is a change of a file in `cases`.

`SHOAL_GOLDEN=write pytest tests/golden/spec` writes them anew; read the difference before committing it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shoal.errors import SpecError
from shoal.spec import job_schema, spec_from_flags
from shoal.spec.files import load_service, read_job
from shoal.spec.parse import service_schema

HERE = Path(__file__).parent
SCHEMA = HERE.parents[2] / "docs" / "reference" / "job.schema.json"


def assert_golden(path: Path, text: str) -> None:
    if os.environ.get("SHOAL_GOLDEN") == "write":
        path.write_text(text)
    assert path.read_text() == text


def error_text(error: SpecError) -> str:
    return "\n".join(
        [f"error: {error.message}", *(f"  {line}" for line in error.problems), f"hint: {error.hint}", ""]
    )


@pytest.mark.parametrize("case", ["many_mistakes", "misplaced_keys", "not_yaml", "wrong_kinds"])
def test_wrong_job_file_gets_every_mistake_in_the_golden_text(case: str) -> None:
    with pytest.raises(SpecError) as refused:
        read_job((HERE / "cases" / f"{case}.yaml").read_bytes(), "job.yaml")
    assert_golden(HERE / "cases" / f"{case}.txt", error_text(refused.value))


def test_wrong_service_file_gets_every_mistake_in_the_golden_text() -> None:
    with pytest.raises(SpecError) as refused:
        load_service(HERE / "cases" / "service.yaml")
    assert_golden(HERE / "cases" / "service.txt", error_text(refused.value).replace(f"{HERE}/cases/", ""))


def test_wrong_flags_get_every_mistake_in_the_golden_text() -> None:
    with pytest.raises(SpecError) as refused:
        spec_from_flags(
            run="x", gpus="H100x8:", nodes="4+", memory="64G", time_limit="1:30", env=["A"], retry="lots"
        )
    assert_golden(HERE / "cases" / "flags.txt", error_text(refused.value))


def test_the_published_schema_is_the_one_in_force() -> None:
    assert_golden(SCHEMA, json.dumps(job_schema(), indent=2) + "\n")
    assert_golden(SCHEMA.with_name("service.schema.json"), json.dumps(service_schema(), indent=2) + "\n")
