"""Each pattern that a text must match has a sentence for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from shoal.api import queries, requests
from shoal.api.http import problems as problems_module
from shoal.errors import SpecError
from shoal.spec import JobSpec, problems
from shoal.spec.parse import parse_job, parse_service
from shoal.spec.service import ServiceSpec


def patterns(schema: Any) -> Iterator[str]:
    """The patterns of texts, anywhere in the schema that pydantic checks a model with."""
    if isinstance(schema, dict):
        if schema.get("type") == "str" and "pattern" in schema:
            yield schema["pattern"]
        for name, value in schema.items():
            if name != "metadata":
                yield from patterns(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from patterns(value)


def patterns_of(model: type[BaseModel]) -> set[str]:
    model.model_rebuild(force=True)
    return set(patterns(model.__pydantic_core_schema__))


@pytest.mark.parametrize("model", [JobSpec, ServiceSpec])
def test_every_pattern_of_a_spec_has_a_sentence(model: type[BaseModel]) -> None:
    patterns = patterns_of(model)
    assert len(patterns) > 3
    assert patterns <= problems._PATTERNS.keys()


def test_every_pattern_of_a_request_has_a_sentence() -> None:
    models = [*vars(requests).values(), *vars(queries).values()]
    patterns = {
        pattern
        for model in models
        if isinstance(model, type) and issubclass(model, requests.Body | queries.Query)
        for pattern in patterns_of(model)
    }
    assert requests.NAME_PATTERN in patterns
    assert patterns <= {*problems_module.PATTERNS, requests.ENV_PATTERN}  # of secrets, which are never quoted


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"origins": ["x"]}, "is not an origin such as"),
        ({"model": {"job": "train", "save": "newest"}}, "is not the folder of a checkpoint"),
    ],
)
def test_a_text_that_does_not_match_is_refused_with_the_sentence(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_service({"name": "chat", "run": "true", **spec})


def test_a_pattern_without_a_sentence_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "_PATTERNS", {})
    monkeypatch.setattr(problems.problem_sentence, "__defaults__", ({},))
    with pytest.raises(SpecError, match="is not of the form"):
        parse_job({"run": "true", "name": "a b"})
