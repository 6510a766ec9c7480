"""Decide how many replicas a service should have from what its data planes count. Pure.

It scales up quickly: by the mean of a few seconds, or at once when a request waits for a slot. It scales
down slowly: only when the largest need over a long time was smaller. The decided number counts whether the
replicas are ready or not, so replicas that are starting are not added twice. The last replica goes in a step
of its own after a long time without any request, because the next request pays a whole cold start.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from math import ceil

import msgspec

from shoal.serving.scaling.traffic import FRESH_S, KEPT_S, Sample

COLD_STARTS = 4
"""Releasing a replica and needing it again within this many of its cold starts costs more than keeping it."""
NEWEST_S = 2.0
"""A queue seen this recently counts as present."""


class ScalingMetric(StrEnum):
    """The metric of a scaling rule."""

    CONCURRENCY = "concurrency"
    """Requests in replicas, and requests that wait for one."""
    RPS = "rps"
    QUEUE = "queue"
    """Requests that wait."""
    TOKENS = "tokens"
    """Chunks of event streams, by the second."""


class ScalingRule(msgspec.Struct, frozen=True, kw_only=True):
    target: ScalingMetric = ScalingMetric.CONCURRENCY
    value: float = 8.0
    """Value of the target for one replica."""
    cap: int = 64
    """Requests that one replica takes at once."""
    least: int
    most: int
    window_s: float = 6.0
    cooldown_s: float = 60.0
    to_zero_after_s: float = 300.0
    sleep_after_s: float | None = None
    """None: the server cannot sleep."""


class ScalingDecision(msgspec.Struct, frozen=True, kw_only=True):
    replicas: int
    because: str = ""
    """Empty if nothing changes."""


def decide(
    rule: ScalingRule,
    replicas: int,
    samples: Sequence[Sample],
    now: float,
    *,
    changed_s: float,
    cold_start_s: float = 0.0,
) -> ScalingDecision:
    """Return the decision. `replicas` is the number decided `changed_s` ago. `samples` are oldest first, on
    the clock of `now`. Without recent samples the number stays, except for the bounds.
    """
    bounded = min(max(replicas, rule.least), rule.most)
    if bounded != replicas:
        return ScalingDecision(replicas=bounded, because=f"the limits are {rule.least} to {rule.most}")
    if not samples or now - samples[-1].at > FRESH_S:
        return ScalingDecision(replicas=replicas)
    up = min(_needed_now(rule, samples, now), rule.most)
    if up > replicas:
        return ScalingDecision(replicas=up, because=_reason(rule, samples[-1]))
    # Not less than the window, or samples that still count for scaling up would be ignored here.
    calm_s = min(max(rule.cooldown_s, COLD_STARTS * cold_start_s, rule.window_s), KEPT_S)
    if changed_s < calm_s:
        return ScalingDecision(replicas=replicas)
    return _fewer(rule, replicas, samples, now, calm_s, cold_start_s)


def should_sleep(
    rule: ScalingRule, replicas: int, samples: Sequence[Sample], now: float, *, is_asleep: bool
) -> bool:
    """Return whether the last replica should sleep: no request has come for long, and none waits.

    Without recent samples it stays as it is.
    """
    if rule.sleep_after_s is None or replicas != 1:
        return False
    if not samples or now - samples[-1].at > FRESH_S:
        return is_asleep
    over_s = NEWEST_S if is_asleep else rule.sleep_after_s
    if any(
        sample.in_flight or sample.queued or sample.requests
        for sample in samples
        if now - sample.at <= over_s
    ):
        return False
    return is_asleep or now - samples[0].at >= over_s


def _fewer(
    rule: ScalingRule,
    replicas: int,
    samples: Sequence[Sample],
    now: float,
    calm_s: float,
    cold_start_s: float,
) -> ScalingDecision:
    if now - samples[0].at < calm_s:
        return ScalingDecision(replicas=replicas)  # the need before the first sample is unknown
    lately = [sample for sample in samples if now - sample.at <= calm_s]
    if sum(sample.seconds for sample in lately) < calm_s / 2:
        return ScalingDecision(replicas=replicas)  # too few samples: the need in the other seconds is unknown
    most = max(needed(rule, sample) for sample in lately)
    down = max(most, rule.least, 1)
    if down < replicas:
        return ScalingDecision(replicas=down, because=f"no more than {most} were needed for {calm_s:g} s")
    zero_s = max(rule.to_zero_after_s, cold_start_s, rule.window_s)
    if replicas == 1 and rule.least == 0 and now - samples[0].at >= zero_s:
        lately = [sample for sample in samples if now - sample.at <= zero_s]
        if not any(sample.in_flight or sample.queued or sample.requests for sample in lately):
            return ScalingDecision(replicas=0, because=f"no request for {zero_s:g} s")
    return ScalingDecision(replicas=replicas)


def needed(rule: ScalingRule, sample: Sample) -> int:
    """Return the replicas that this second needed; at least one if it had a request."""
    return _mean_needed(rule, [sample], sample.seconds)


def _mean_needed(rule: ScalingRule, samples: Sequence[Sample], over: float) -> int:
    """Return the replicas that the mean of several seconds needed."""
    in_flight = sum(sample.in_flight * sample.seconds for sample in samples) / over
    queued = sum(sample.queued * sample.seconds for sample in samples) / over
    waiting = ceil(queued / rule.cap)
    counts = {
        ScalingMetric.CONCURRENCY: ceil((in_flight + queued) / rule.value),
        ScalingMetric.RPS: ceil(
            sum(sample.requests * sample.seconds for sample in samples) / over / rule.value
        )
        + waiting,
        ScalingMetric.TOKENS: ceil(
            sum(sample.tokens * sample.seconds for sample in samples) / over / rule.value
        )
        + waiting,
        ScalingMetric.QUEUE: ceil(in_flight / rule.cap) + ceil(queued / rule.value),
    }
    return max(counts[rule.target], int(bool(in_flight or queued)))


def _needed_now(rule: ScalingRule, samples: Sequence[Sample], now: float) -> int:
    """Return the need by the mean of the window, or by the newest sample if a request waits now."""
    window = [sample for sample in samples if now - sample.at <= rule.window_s]
    # A second without a report counts as 0: the mean is over the whole window, not over the samples.
    over = max(sum(sample.seconds for sample in window), min(rule.window_s, now - samples[0].at + 1))
    newest = samples[-1]
    is_waited = newest.queued > 0 and now - newest.at <= NEWEST_S
    return max(_mean_needed(rule, window, over), needed(rule, newest) if is_waited else 0)


def _reason(rule: ScalingRule, newest: Sample) -> str:
    seen = f"{newest.in_flight} requests there, {newest.queued} waiting"
    return f"{seen}; {rule.target} of {rule.value:g} for each replica"
