"""How many replicas there should be, for any traffic: bounds, speed, patience, and no flapping."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.serving.scaling.autoscaler import COLD_STARTS, ScalingMetric, ScalingRule, decide, needed
from shoal.serving.scaling.traffic import Sample

NOW = 10_000.0
TARGETS = st.sampled_from(ScalingMetric)


@st.composite
def rules(draw: st.DrawFn) -> ScalingRule:
    least = draw(st.integers(0, 4))
    return ScalingRule(
        target=draw(TARGETS),
        value=draw(st.sampled_from([0.5, 1.0, 8.0, 100.0])),
        cap=draw(st.sampled_from([1, 8, 64])),
        least=least,
        most=draw(st.integers(max(least, 1), 12)),
        cooldown_s=draw(st.sampled_from([1.0, 5.0, 60.0])),
        to_zero_after_s=draw(st.sampled_from([1.0, 30.0, 300.0])),
    )


@st.composite
def histories(draw: st.DrawFn) -> list[Sample]:
    """Up to ten minutes, ending now, perhaps with gaps."""
    length = draw(st.integers(1, 600))
    seeds = draw(st.lists(st.integers(0, 60), min_size=1, max_size=12))
    gap = draw(st.integers(0, 20))
    return [
        Sample(
            at=int(NOW) - length + 1 + second,
            in_flight=seeds[second % len(seeds)],
            queued=seeds[(second * 7) % len(seeds)] // 20,
            requests=seeds[(second * 3) % len(seeds)],
            tokens=seeds[(second * 5) % len(seeds)] * 10,
        )
        for second in range(length)
        if not 0 < gap < length - second < 2 * gap
    ]


@given(rules(), st.integers(0, 15), histories(), st.floats(0, 1000), st.floats(0, 200))
def test_choice_is_within_bounds_and_stays_once_it_is_made(
    rule: ScalingRule, replicas: int, samples: list[Sample], changed_s: float, cold_start_s: float
) -> None:
    first = decide(rule, replicas, samples, NOW, changed_s=changed_s, cold_start_s=cold_start_s)
    assert rule.least <= first.replicas <= rule.most
    assert bool(first.because) == (first.replicas != replicas)
    second = decide(rule, first.replicas, samples, NOW, changed_s=0.0, cold_start_s=cold_start_s)
    if rule.least <= replicas <= rule.most:
        assert second.replicas == first.replicas
    else:  # first move into the bounds, then follow the load
        assert second.replicas >= first.replicas


@given(rules(), histories(), st.integers(1, 50), st.floats(0, 1000))
def test_queued_requests_are_served_whatever_the_smoothing_window(
    rule: ScalingRule, samples: list[Sample], queued: int, changed_s: float
) -> None:
    samples = [*samples[:-1], Sample(at=int(NOW), in_flight=samples[-1].in_flight, queued=queued)]
    for replicas in range(rule.least, rule.most + 1):
        chosen = decide(rule, replicas, samples, NOW, changed_s=changed_s).replicas
        assert chosen >= min(needed(rule, samples[-1]), rule.most)
        assert chosen >= 1


@given(rules(), histories(), st.floats(0, 200))
def test_fewer_are_chosen_only_when_all_of_a_long_time_needed_fewer(
    rule: ScalingRule, samples: list[Sample], cold_start_s: float
) -> None:
    calm_s = max(rule.cooldown_s, COLD_STARTS * cold_start_s, rule.window_s)
    for replicas in range(rule.least, rule.most + 1):
        for changed_s in (0.0, calm_s - 1.0, calm_s, 5000.0):
            chosen = decide(
                rule, replicas, samples, NOW, changed_s=changed_s, cold_start_s=cold_start_s
            ).replicas
            if chosen < replicas:
                assert changed_s >= calm_s
                assert NOW - samples[0].at >= calm_s
                assert chosen >= max(needed(rule, sample) for sample in samples if NOW - sample.at <= calm_s)
            if chosen == 0 and replicas > 0:
                assert replicas == 1, "the last one goes in a step of its own"
                long_s = max(rule.to_zero_after_s, rule.window_s)
                idle = [sample for sample in samples if NOW - sample.at <= long_s]
                assert not any(sample.requests or sample.in_flight or sample.queued for sample in idle)


@settings(max_examples=30)
@given(rules(), st.integers(0, 60), st.integers(0, 12), st.floats(0, 60))
def test_steady_load_keeps_a_steady_number_of_replicas(
    rule: ScalingRule, load: int, start: int, cold_start_s: float
) -> None:
    samples: list[Sample] = []
    replicas, changed_at, changes = start, 0, []
    for second in range(1200):
        samples.append(Sample(at=second, in_flight=load, requests=load, tokens=load * 10))
        chosen = decide(
            rule,
            replicas,
            samples[-900:],
            float(second),
            changed_s=second - changed_at,
            cold_start_s=cold_start_s,
        ).replicas
        if chosen != replicas:
            changes.append((replicas, chosen))
            replicas, changed_at = chosen, second
    ups = sum(after > before for before, after in changes)
    downs = len(changes) - ups
    # Into the bounds, then up once or down once, then to zero: never back and forth.
    assert ups <= 2
    assert downs <= 3
    directions = [after > before for before, after in changes[1:]]
    assert len(set(directions)) <= 1
    assert replicas == min(max(needed(rule, samples[-1]), rule.least, 0), rule.most)


def test_seconds_without_a_report_do_not_count_as_quiet() -> None:
    rule = ScalingRule(least=1, most=8, cooldown_s=10.0)
    busy = [Sample(at=int(NOW) - second, in_flight=60) for second in range(60, 20, -1)]
    silence_then = [*busy, Sample(at=int(NOW))]
    assert decide(rule, 8, silence_then, NOW, changed_s=30.0).replicas == 8
    quiet = [*busy, *(Sample(at=int(NOW) - second) for second in range(10, -1, -1))]
    assert decide(rule, 8, quiet, NOW, changed_s=30.0).replicas == 1
