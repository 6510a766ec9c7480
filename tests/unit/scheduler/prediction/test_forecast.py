"""What is expected of a run, learned from runs that have ended."""

from __future__ import annotations

import pytest

from shoal.scheduler.prediction.forecast import NUM_SHARES, UNKNOWN_S, Forecast, RunFeatures, RunTimeSpread

HOUR = 3600.0


def features(user: str | None = "ana", *, limit_s: float | None = 24 * HOUR, **fields: object) -> RunFeatures:
    return RunFeatures(user=user, limit_s=limit_s, **fields)  # type: ignore[arg-type]


def forecast_after(noted: RunFeatures, *runs: float) -> Forecast:
    forecast = Forecast()
    for run_s in runs:
        forecast.note(noted, run_s)
    return forecast


def test_the_first_run_of_all_is_expected_to_use_its_limit() -> None:
    assert Forecast().expect(features()).expected_s == 24 * HOUR


def test_without_a_limit_and_without_runs_an_hour_is_expected() -> None:
    assert Forecast().expect(features(limit_s=None)).expected_s == UNKNOWN_S


def test_a_users_own_runs_outweigh_the_limit() -> None:
    expected_s = forecast_after(features(), 600, 600, 600, 600).expect(features()).expected_s
    assert 600 <= expected_s < 700


def test_a_new_user_is_expected_to_use_the_share_of_the_limit_that_others_did() -> None:
    forecast = forecast_after(features("ana", limit_s=10 * HOUR), *[HOUR] * 8)
    expected_s = forecast.expect(features("ben", limit_s=5 * HOUR)).expected_s
    assert 0.4 * HOUR < expected_s < 0.8 * HOUR


def test_name_and_shape_predict_better_than_the_user_alone() -> None:
    forecast = Forecast()
    for _ in range(10):
        forecast.note(features(name="train", shape=(4, 8, 32)), 20 * HOUR)
        forecast.note(features(name="test", shape=(1, 1, 4)), 60)
    assert forecast.expect(features(name="train", shape=(4, 8, 32))).expected_s > 15 * HOUR
    assert forecast.expect(features(name="test", shape=(1, 1, 4))).expected_s < 600


def test_of_one_kind_the_last_few_runs_count() -> None:
    forecast = forecast_after(features(), *[20 * HOUR] * 50, *[60] * 4)
    assert forecast.expect(features()).expected_s < 100


def test_without_limits_a_new_user_is_expected_to_run_what_the_project_runs() -> None:
    forecast = forecast_after(features("ana", limit_s=None, project="vision"), 100, 100, 100)
    newcomer = forecast.expect(features("ben", limit_s=None, project="vision"))
    assert newcomer.expected_s < 200


def test_a_user_named_like_a_shared_kind_is_only_a_user() -> None:
    forecast = forecast_after(features("limited"), 60, 60, 60, 60)
    forecast.note(features("any", limit_s=None), 60)
    assert forecast.expect(features("ana", limit_s=12 * HOUR)).expected_s < HOUR
    assert (
        forecast_after(features("any", limit_s=24 * HOUR), 60)
        .expect(features("ben", limit_s=None))
        .expected_s
        == UNKNOWN_S
    )


def test_a_run_is_sure_to_last_if_all_recent_runs_used_their_limits() -> None:
    exact = forecast_after(features(limit_s=HOUR), *[HOUR] * NUM_SHARES)
    assert exact.expect(features("ben", limit_s=2 * HOUR)).sure_s == 2 * HOUR


def test_two_runs_that_died_at_once_end_the_certainty() -> None:
    forecast = forecast_after(features(limit_s=HOUR), *[HOUR] * NUM_SHARES, 1)
    assert forecast.expect(features(limit_s=HOUR)).sure_s == HOUR
    forecast.note(features(limit_s=HOUR), 1)
    assert forecast.expect(features(limit_s=HOUR)).sure_s == pytest.approx(1)


def test_few_runs_are_sure_of_nothing() -> None:
    assert forecast_after(features(), *[24 * HOUR] * (NUM_SHARES - 1)).expect(features()).sure_s == 0


def test_kinds_not_seen_for_longest_are_forgotten_first() -> None:
    forecast = Forecast(max_kinds=12)
    forecast.note(features("ana"), 60)
    for number in range(8):
        forecast.note(features(f"user-{number}"), 12 * HOUR)
    assert forecast.num_kinds == 12
    assert forecast.expect(features("ana")).expected_s > HOUR


def spread(*runs: float, limit_s: float | None = 100.0) -> RunTimeSpread:
    return RunTimeSpread(expected_s=40.0, limit_s=limit_s, runs=runs)


def test_quantiles_lie_between_the_runs_seen() -> None:
    assert spread(50, 10, 30).quantile(0.5) == 30
    assert spread(50, 10, 30).quantile(0.375) == 20


def test_extreme_quantiles_reach_towards_nothing_and_the_limit() -> None:
    assert spread(50, 10, 30).quantile(0) == 0
    assert spread(50, 10, 30).quantile(1) == 100


def test_a_run_that_has_lasted_is_compared_with_those_that_lasted_longer() -> None:
    assert spread(50, 10, 30).quantile(0.5, elapsed_s=20) == pytest.approx(40)


def test_a_run_that_outlasted_all_similar_runs_ends_between_now_and_its_limit() -> None:
    assert spread(50, 10, 30).quantile(0.5, elapsed_s=60) == 80


def test_a_run_that_outlasted_all_similar_runs_without_a_limit_may_double() -> None:
    assert spread(50, 10, 30, limit_s=None).quantile(0.5, elapsed_s=60) == 90


def test_a_run_past_its_limit_is_expected_to_end_now() -> None:
    assert spread(50, 10, 30).quantile(0.95, elapsed_s=130) == 130


def test_quantiles_use_the_users_runs_and_all_runs_with_similar_limits() -> None:
    forecast = forecast_after(features("ben", limit_s=100.0), 90.0)
    forecast.note(features("ana", limit_s=100.0), 50.0)
    assert set(forecast.spread(features("ana", limit_s=100.0)).runs) == {90.0, 50.0}


def test_quantiles_of_a_run_without_similar_runs_reach_its_limit() -> None:
    assert Forecast().spread(features(limit_s=100.0)).quantile(0.9) == pytest.approx(90)
