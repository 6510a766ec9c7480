"""Refusals of wrong requests use our words for every kind of mistake."""

from __future__ import annotations

import re
from typing import Any

import pytest

from shoal.api import queries, requests
from shoal.api.http.bodies import validate
from shoal.api.http.problems import describe_problem
from shoal.errors import SpecError

THEIRS = re.compile(r"Input should|Value error|Extra inputs|Field required|unable to|should have|valid ")
JUNK: tuple[Any, ...] = (
    None, True, 5, -5, 10**30, 1.5, float("inf"), "", "x", "A b", "\x00", "y" * 9000, [], [1], ["x", None],
    {}, {"x": 1}, {"gpus": "two"}, [{}], "-3",
)  # fmt: skip
BODIES = [
    requests.SubmitBody, requests.NodeBody, requests.NewWindow, requests.NewUser, requests.UserChange,
    requests.ProjectLimits, requests.NewProject, requests.MemberBody, requests.NewToken,
]  # fmt: skip
QUERIES = [queries.PageQuery, queries.JobQuery, queries.LogQuery, queries.EventQuery, queries.WhyQuery]


def problems(model: Any, data: Any) -> tuple[str, ...]:
    try:
        validate(model, data)
    except SpecError as error:
        return tuple(error.problems)
    return ()


@pytest.mark.parametrize("model", [*BODIES, *QUERIES], ids=lambda model: model.__name__)
def test_no_validation_message_uses_the_librarys_words(model: Any) -> None:
    wrong = [{field: junk} for field in model.model_fields for junk in JUNK]
    for data in [*wrong, *JUNK, {"no_such_field": 1}]:
        for sentence in problems(model, data):
            assert not THEIRS.search(sentence), (data, sentence)
            assert sentence.isprintable()


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (requests.ProjectLimits, {"weight": 0}, "`weight`: `0` is below the least, 0.001"),
        (requests.ProjectLimits, {"wieght": 1}, "unknown field `wieght`; did you mean `weight`?"),
        (
            requests.ProjectLimits,
            {"quota": {"gpus": "8"}},
            "`quota.gpus` must be a whole number, not the text `8`",
        ),
        (queries.PageQuery, {"limit": "many"}, "`limit` must be a whole number, not the text `many`"),
        (requests.NewToken, {"lifetime_s": 0}, "`lifetime_s`: `0` is not above 0"),
        (requests.NewProject, {"name": "Vision"}, "`name`: `Vision` is not made of lower-case letters"),
        (requests.MemberBody, {"role": "leed"}, "did you mean `lead`?"),
    ],
)
def test_wrong_value_is_named_with_what_it_may_be(model: Any, data: Any, message: str) -> None:
    assert any(message in problem for problem in problems(model, data)), problems(model, data)


def test_secret_is_never_quoted() -> None:
    data = {"spec": {}, "secrets": {"KEY": 12345678, "wrong name": "87654321"}}
    sentences = " ".join(problems(requests.SubmitBody, data))
    assert "secrets" in sentences
    assert "12345678" not in sentences
    assert "wrong name" not in sentences
    assert "87654321" not in describe_problem(
        {"loc": ("body", "secrets", "KEY"), "type": "string_type", "input": "87654321"}
    )
