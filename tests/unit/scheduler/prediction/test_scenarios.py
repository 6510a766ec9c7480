"""Futures that the planner plays, worked out by hand for simple cases."""

from __future__ import annotations

import msgspec
import pytest

from shoal.scheduler import Candidate, Holding, Policy, Snapshot
from shoal.scheduler.prediction import scenarios as predict_module
from shoal.scheduler.prediction.forecast import RunTimeSpread
from shoal.scheduler.prediction.scenarios import NUM_SCENARIOS, StartSpan, look_ahead, predict
from tests.support.clusters import ALL_GPUS, NOW, candidate, holding, nodes, request, snapshot

HOUR = 3600.0


def exactly(run_s: float) -> RunTimeSpread:
    """A run time that is known exactly."""
    return RunTimeSpread(expected_s=run_s, limit_s=run_s, runs=(run_s,) * 1000)


def foresee(facts: Snapshot, *wanted: str, run_s: float = HOUR) -> dict[str, StartSpan]:
    return predict(facts, Policy(), NOW, wanted, lambda _: exactly(run_s))


def test_job_behind_one_with_a_known_end_starts_exactly_then() -> None:
    """The running job began ten minutes ago and takes an hour."""
    facts = snapshot(nodes(1), (candidate(1, request(gpus=8)),), (holding(1, {"node-01": ALL_GPUS}),))
    assert foresee(facts, "att-1") == {"att-1": StartSpan(3000.0, 3000.0, 3000.0)}


def test_job_behind_a_replica_of_a_service_has_no_prediction() -> None:
    """A replica does not end by itself, however long replicas ran before."""
    held = msgspec.structs.replace(holding(1, {"node-01": ALL_GPUS}), is_endless=True)
    facts = snapshot(nodes(1), (candidate(2, request(gpus=8)),), (held,))
    assert foresee(facts, "att-2") == {}
    beside = snapshot(nodes(2), (candidate(2, request(gpus=8)),), (held,))
    assert foresee(beside, "att-2") == {"att-2": StartSpan(0.0, 0.0, 0.0)}


def test_jobs_of_one_queue_are_predicted_one_after_the_other() -> None:
    waiting = tuple(candidate(number, request(gpus=8)) for number in (1, 2, 3))
    facts = snapshot(nodes(1), waiting, (holding(1, {"node-01": ALL_GPUS}),))
    spans = foresee(facts, "att-1", "att-2", "att-3")
    assert [spans[f"att-{number}"].middle_s for number in (1, 2, 3)] == [3000.0, 6600.0, 10_200.0]


def test_job_that_fits_starts_now() -> None:
    facts = snapshot(nodes(1), (candidate(1, request(gpus=8)),))
    assert foresee(facts, "att-1") == {"att-1": StartSpan(0.0, 0.0, 0.0)}


def test_job_that_never_fits_has_no_prediction() -> None:
    facts = snapshot(nodes(1), (candidate(1, request(gpus=8, nodes=2)),))
    assert foresee(facts, "att-1", "nobody") == {}


def test_deferred_job_is_predicted_to_start_when_its_backoff_ends() -> None:
    facts = snapshot(nodes(1), (candidate(1, request(gpus=8), not_before=NOW + 40),))
    assert foresee(facts, "att-1") == {"att-1": StartSpan(40.0, 40.0, 40.0)}


def test_scenarios_span_the_quantiles_of_the_run_that_is_waited_for() -> None:
    """The run ends between now and its limit in 50 minutes. Nothing else is known."""
    facts = snapshot(
        nodes(1), (candidate(1, request(gpus=8)),), (holding(1, {"node-01": ALL_GPUS}, time_limit_s=HOUR),)
    )

    def between_now_and_the_limit(work: Candidate | Holding) -> RunTimeSpread:
        return RunTimeSpread(expected_s=HOUR, limit_s=HOUR, runs=())

    spread = predict(facts, Policy(), NOW, ["att-1"], between_now_and_the_limit)["att-1"]
    step = 3000.0 / NUM_SCENARIOS
    assert spread == pytest.approx((0.5 * step, 1500.0, 3000.0 - 0.5 * step))


def test_jobs_of_one_owner_are_long_or_short_together() -> None:
    """The last of three waits for three long runs in one future and for three short ones in another."""
    held = (holding(1, {"node-01": ALL_GPUS}, placed_at=NOW, time_limit_s=HOUR, owner="ana"),)
    waiting = tuple(candidate(n, request(gpus=8, time_limit_s=HOUR), owner="ana") for n in (1, 2, 3))

    def anything(_: Candidate | Holding) -> RunTimeSpread:
        return RunTimeSpread(expected_s=HOUR, limit_s=HOUR, runs=())

    span = predict(snapshot(nodes(1), waiting, held), Policy(), NOW, ["att-3"], anything)["att-3"]
    step = HOUR / NUM_SCENARIOS
    assert span == pytest.approx((1.5 * step, 1.5 * HOUR, 3 * HOUR - 1.5 * step))


def test_queue_that_is_too_long_is_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = tuple(candidate(number, request(gpus=8)) for number in range(30))
    facts = snapshot(nodes(1), waiting, (holding(1, {"node-01": ALL_GPUS}),))
    monkeypatch.setattr(predict_module, "MOST_WORK", 20)
    assert set(foresee(facts, "att-3", "att-29")) == {"att-3"}
    monkeypatch.setattr(predict_module, "MOST_WORK", 5)
    assert foresee(facts, "att-3") == {}


def test_look_ahead_counts_what_it_planned() -> None:
    waiting = tuple(candidate(number, request(gpus=8)) for number in range(5))
    facts = snapshot(nodes(1), waiting)
    future = look_ahead(facts, Policy(), NOW, ["att-2"], lambda _: HOUR, 1000)
    assert (future.starts, future.num_starts) == ({"att-2": NOW + 2 * HOUR}, 3)
