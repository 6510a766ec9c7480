"""Every operation of the OpenAPI over a real socket, with generated requests and sequences: never a 5xx."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from shoal.api.app import describe_api
from tests.support.planes.world import open_server

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
BUDGET = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=QUIET,
    phases=[Phase.explicit, Phase.generate],
)
schemathesis.serializer.alias("application/x-tar", "application/octet-stream")
SCHEMA = schemathesis.openapi.from_dict(describe_api())
PLAIN = SCHEMA.exclude(path_regex="/stream$")
STREAMS = SCHEMA.include(path_regex="/stream$")


def operations(schema: Any) -> list[Any]:
    return [
        pytest.param(operation.ok(), id=operation.ok().label) for operation in schema.get_all_operations()
    ]


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Where to send requests, and with which token."""
    with open_server(tmp_path_factory.mktemp("schemathesis")) as (world, port):
        token = world.tokens["admin"]
        yield {"base_url": f"http://127.0.0.1:{port}", "headers": {"Authorization": f"Bearer {token}"}}


@pytest.mark.parametrize("operation", operations(PLAIN))
def test_no_generated_request_breaks_the_server(operation: Any, wire: dict[str, Any]) -> None:
    @given(case=operation.as_strategy())
    @BUDGET
    def attempt(case: Any) -> None:
        case.call_and_validate(**wire, checks=CHECKS)

    attempt()


@pytest.mark.parametrize("operation", operations(STREAMS))
def test_no_generated_request_breaks_a_stream(operation: Any, wire: dict[str, Any]) -> None:
    @given(case=operation.as_strategy())
    @settings(BUDGET, max_examples=5)
    def attempt(case: Any) -> None:
        with suppress(requests.Timeout):  # the stream is open and quiet, as it should be
            case.call_and_validate(**wire, checks=[not_a_server_error], timeout=0.5)

    attempt()


def test_no_generated_sequence_of_requests_breaks_the_server(wire: dict[str, Any]) -> None:
    seen: list[int] = []
    broken: list[str] = []

    class Machine(PLAIN.as_state_machine()):  # type: ignore[misc]
        def get_call_kwargs(self, case: Any) -> dict[str, Any]:
            return wire

        def validate_response(self, response: Any, case: Any, **_: Any) -> None:
            seen.append(response.status_code)
            try:
                case.validate_response(response, checks=CHECKS)
            except (Failure, FailureGroup) as failure:
                broken.append(f"{case.method} {case.path}: {failure}")

    # A server remembers, so the same choices may get other replies. Hypothesis calls that flaky and stops.
    # Another seed continues.
    for number in range(8):
        seed(number)(Machine)
        with suppress(Flaky):
            Machine.run(settings=settings(BUDGET, derandomize=False, max_examples=15, stateful_step_count=8))
    assert broken == []
    assert len(seen) > 100
    assert {200, 201, 404, 422} <= set(seen)
