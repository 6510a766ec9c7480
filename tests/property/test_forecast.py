"""Invariants of every forecast, whatever runs were noted before."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shoal.scheduler.order.due import due_time, score
from shoal.scheduler.prediction.forecast import Forecast, RunFeatures

seconds = st.floats(0.0, 1e7, allow_nan=False)
asks = st.builds(
    RunFeatures,
    user=st.sampled_from([None, "ana", "ben", "any", "limited"]),
    project=st.sampled_from([None, "vision", "speech"]),
    name=st.sampled_from([None, "train", "test"]),
    shape=st.tuples(st.integers(1, 4), st.integers(0, 8)),
    limit_s=st.none() | st.floats(0.5, 1e7),
)
histories = st.lists(st.tuples(asks, seconds), max_size=60)
quantiles = st.floats(0.0, 1.0)


def taught(history: list[tuple[RunFeatures, float]], max_kinds: int = 1000) -> Forecast:
    forecast = Forecast(max_kinds=max_kinds)
    for ask, run_s in history:
        forecast.note(ask, run_s)
    return forecast


@given(histories, asks)
def test_nothing_is_expected_above_the_limit_or_below_nothing(
    history: list[tuple[RunFeatures, float]], ask: RunFeatures
) -> None:
    expectation = taught(history).expect(ask)
    ceiling = float("inf") if ask.limit_s is None else ask.limit_s
    assert 0 < expectation.expected_s <= ceiling
    assert 0 <= expectation.sure_s <= ceiling


@given(histories, asks, seconds, st.lists(quantiles, min_size=2, max_size=6))
def test_quantiles_rise_from_what_has_elapsed_to_the_limit(
    history: list[tuple[RunFeatures, float]], ask: RunFeatures, elapsed_s: float, places: list[float]
) -> None:
    spread = taught(history).spread(ask)
    values = [spread.quantile(place, elapsed_s=elapsed_s) for place in sorted(places)]
    assert values == sorted(values)
    assert values[0] >= elapsed_s
    if ask.limit_s is not None:
        assert values[-1] <= max(ask.limit_s, elapsed_s)


@given(histories, asks, quantiles, st.lists(seconds, min_size=2, max_size=6))
def test_a_longer_elapsed_run_is_expected_to_end_later(
    history: list[tuple[RunFeatures, float]], ask: RunFeatures, place: float, ages: list[float]
) -> None:
    spread = taught(history).spread(ask)
    ends = [spread.quantile(place, elapsed_s=age) for age in sorted(ages)]
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(ends))


@given(histories, asks)
def test_the_same_history_gives_the_same_answer(
    history: list[tuple[RunFeatures, float]], ask: RunFeatures
) -> None:
    assert taught(history).expect(ask) == taught(history).expect(ask)
    assert taught(history).spread(ask) == taught(history).spread(ask)


@given(histories, asks)
def test_queries_do_not_change_the_forecast(
    history: list[tuple[RunFeatures, float]], ask: RunFeatures
) -> None:
    queried = Forecast()
    for features, run_s in history:
        queried.expect(ask)
        queried.note(features, run_s)
    assert queried.expect(ask) == taught(history).expect(ask)


@given(histories, st.integers(1, 20))
def test_no_more_kinds_are_remembered_than_allowed(
    history: list[tuple[RunFeatures, float]], max_kinds: int
) -> None:
    assert taught(history, max_kinds).num_kinds <= max_kinds


@given(histories, asks, seconds, st.floats(0.0, 2.0))
def test_every_job_is_due_within_a_bound_that_its_limit_sets(
    history: list[tuple[RunFeatures, float]], ask: RunFeatures, submitted_at: float, share: float
) -> None:
    expectation = taught(history).expect(ask)
    slack_s = due_time(submitted_at, expectation, share) - submitted_at
    assert 0 <= slack_s + 1 <= max(14 * 3600, 50 * (ask.limit_s or 0)) + 2
    assert score(expectation.expected_s, share) >= 0
