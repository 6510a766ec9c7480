"""What every forecast keeps to, whatever was noted before."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shoal.scheduler.due import due_at, score
from shoal.scheduler.forecast import Ask, Forecast

seconds = st.floats(0.0, 1e7, allow_nan=False)
asks = st.builds(
    Ask,
    user=st.sampled_from([None, "ana", "ben", "any", "limited"]),
    project=st.sampled_from([None, "vision", "speech"]),
    name=st.sampled_from([None, "train", "test"]),
    shape=st.tuples(st.integers(1, 4), st.integers(0, 8)),
    limit_s=st.none() | st.floats(0.5, 1e7),
)
histories = st.lists(st.tuples(asks, seconds), max_size=60)
quantiles = st.floats(0.0, 1.0)


def taught(history: list[tuple[Ask, float]], max_kinds: int = 1000) -> Forecast:
    forecast = Forecast(max_kinds=max_kinds)
    for ask, run_s in history:
        forecast.note(ask, run_s)
    return forecast


@given(histories, asks)
def test_nothing_is_expected_above_the_limit_or_below_nothing(
    history: list[tuple[Ask, float]], ask: Ask
) -> None:
    found = taught(history).expect(ask)
    ceiling = float("inf") if ask.limit_s is None else ask.limit_s
    assert 0 < found.expected_s <= ceiling
    assert 0 <= found.sure_s <= ceiling


@given(histories, asks, seconds, st.lists(quantiles, min_size=2, max_size=6))
def test_quantiles_rise_from_what_has_elapsed_to_the_limit(
    history: list[tuple[Ask, float]], ask: Ask, elapsed_s: float, places: list[float]
) -> None:
    found = taught(history).spread(ask)
    values = [found.quantile(place, elapsed_s=elapsed_s) for place in sorted(places)]
    assert values == sorted(values)
    assert values[0] >= elapsed_s
    if ask.limit_s is not None:
        assert values[-1] <= max(ask.limit_s, elapsed_s)


@given(histories, asks, quantiles, st.lists(seconds, min_size=2, max_size=6))
def test_the_longer_a_run_has_lasted_the_later_it_is_expected_to_end(
    history: list[tuple[Ask, float]], ask: Ask, place: float, ages: list[float]
) -> None:
    found = taught(history).spread(ask)
    ends = [found.quantile(place, elapsed_s=age) for age in sorted(ages)]
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(ends))


@given(histories, asks)
def test_the_same_history_gives_the_same_answer(history: list[tuple[Ask, float]], ask: Ask) -> None:
    assert taught(history).expect(ask) == taught(history).expect(ask)
    assert taught(history).spread(ask) == taught(history).spread(ask)


@given(histories, asks)
def test_asking_changes_nothing(history: list[tuple[Ask, float]], ask: Ask) -> None:
    asked = Forecast()
    for known, run_s in history:
        asked.expect(ask)
        asked.note(known, run_s)
    assert asked.expect(ask) == taught(history).expect(ask)


@given(histories, st.integers(1, 20))
def test_no_more_kinds_are_remembered_than_allowed(history: list[tuple[Ask, float]], max_kinds: int) -> None:
    assert taught(history, max_kinds).num_kinds <= max_kinds


@given(histories, asks, seconds, st.floats(0.0, 2.0))
def test_every_job_is_due_within_a_bound_that_its_limit_sets(
    history: list[tuple[Ask, float]], ask: Ask, submitted_at: float, share: float
) -> None:
    found = taught(history).expect(ask)
    slack_s = due_at(submitted_at, found, share) - submitted_at
    assert 0 <= slack_s + 1 <= max(14 * 3600, 50 * (ask.limit_s or 0)) + 2
    assert score(found.expected_s, share) >= 0
