"""When the last replica of a service should sleep, and when it should not."""

from __future__ import annotations

import pytest

from shoal.serving.scaling.autoscaler import ScalingRule, should_sleep
from shoal.serving.scaling.traffic import Sample

NOW = 1000.5
RULE = ScalingRule(least=0, most=4, sleep_after_s=60.0)


def quiet(seconds: int) -> list[Sample]:
    """Return samples of this many seconds without requests, ending now."""
    return [Sample(at=1000 - ago) for ago in range(seconds, -1, -1)]


def test_last_replica_sleeps_after_a_time_without_requests() -> None:
    assert not should_sleep(RULE, 1, quiet(59), NOW, is_asleep=False)
    assert should_sleep(RULE, 1, quiet(61), NOW, is_asleep=False)


@pytest.mark.parametrize("busy", [{"requests": 1}, {"queued": 1}, {"in_flight": 1}])
def test_request_wakes_the_last_replica_and_keeps_it_awake(busy: dict[str, int]) -> None:
    samples = [*quiet(100)[:-1], Sample(at=1000, **busy)]
    assert not should_sleep(RULE, 1, samples, NOW, is_asleep=True)
    earlier = [*quiet(100)[:70], Sample(at=970, **busy), *quiet(29)]
    assert not should_sleep(RULE, 1, earlier, NOW, is_asleep=False)
    assert should_sleep(RULE, 1, earlier, NOW, is_asleep=True)


def test_sleep_is_unchanged_without_recent_samples_or_a_long_enough_history() -> None:
    for is_asleep in (True, False):
        assert should_sleep(RULE, 1, [], NOW, is_asleep=is_asleep) == is_asleep
        assert should_sleep(RULE, 1, quiet(500), NOW + 60, is_asleep=is_asleep) == is_asleep
        assert should_sleep(RULE, 1, quiet(0), NOW, is_asleep=is_asleep) == is_asleep


def test_several_replicas_do_not_sleep_nor_does_a_server_that_cannot() -> None:
    assert not should_sleep(RULE, 2, quiet(500), NOW, is_asleep=True)
    assert not should_sleep(ScalingRule(least=1, most=1), 1, quiet(500), NOW, is_asleep=False)
