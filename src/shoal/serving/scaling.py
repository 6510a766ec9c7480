"""How many replicas a service should have, by what its data planes count. Pure.

Up quickly, down slowly: more by the mean of a few seconds, or at once when somebody waits for a slot; fewer
only when the most that was needed over a long time was less. What was decided counts, ready or not: replicas
on their way are not asked for twice. The last one goes in a step of its own, after a long time without any
request, since who comes next pays a whole cold start.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from math import ceil

import msgspec

from shoal.serving.traffic import FRESH_S, KEPT_S, Sample

COLD_STARTS = 4
"""To let a replica go and need it again within so many of its cold starts costs more than to keep it."""
NEWEST_S = 2.0
"""A queue that was seen so long ago is there now."""


class Target(StrEnum):
    """What is counted."""

    CONCURRENCY = "concurrency"
    """Requests in replicas and waiting for one."""
    RPS = "rps"
    QUEUE = "queue"
    """Requests that wait."""
    TOKENS = "tokens"
    """Chunks of event streams, by the second."""


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    target: Target = Target.CONCURRENCY
    value: float = 8.0
    """Of the target, for one replica."""
    cap: int = 64
    """Requests that one replica takes at once."""
    least: int
    most: int
    window_s: float = 6.0
    cooldown_s: float = 60.0
    to_zero_after_s: float = 300.0
    sleep_after_s: float | None = None
    """None: its server cannot sleep."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    replicas: int
    because: str = ""
    """Empty where nothing changes."""


def decide(
    rule: Rule,
    replicas: int,
    samples: Sequence[Sample],
    now: float,
    *,
    changed_s: float,
    cold_start_s: float = 0.0,
) -> Choice:
    """`replicas`: how many there should be by now, decided `changed_s` ago. `samples`: oldest first, on the
    clock of `now`. With nothing counted lately it stays as it is, but for the bounds.
    """
    bounded = min(max(replicas, rule.least), rule.most)
    if bounded != replicas:
        return Choice(replicas=bounded, because=f"there may be {rule.least} to {rule.most}")
    if not samples or now - samples[-1].at > FRESH_S:
        return Choice(replicas=replicas)
    up = min(_needed_now(rule, samples, now), rule.most)
    if up > replicas:
        return Choice(replicas=up, because=_told(rule, samples[-1]))
    # Not less than the window: what counts for more must not be forgotten before.
    calm_s = min(max(rule.cooldown_s, COLD_STARTS * cold_start_s, rule.window_s), KEPT_S)
    if changed_s < calm_s:
        return Choice(replicas=replicas)
    return _fewer(rule, replicas, samples, now, calm_s, cold_start_s)


def should_sleep(
    rule: Rule, replicas: int, samples: Sequence[Sample], now: float, *, is_asleep: bool
) -> bool:
    """Whether the last replica should sleep: nobody has asked for anything for long, and nobody waits.

    With nothing counted lately it stays as it is.
    """
    if rule.sleep_after_s is None or replicas != 1:
        return False
    if not samples or now - samples[-1].at > FRESH_S:
        return is_asleep
    over_s = NEWEST_S if is_asleep else rule.sleep_after_s
    if any(one.in_flight or one.queued or one.requests for one in samples if now - one.at <= over_s):
        return False
    return is_asleep or now - samples[0].at >= over_s


def _fewer(
    rule: Rule, replicas: int, samples: Sequence[Sample], now: float, calm_s: float, cold_start_s: float
) -> Choice:
    if now - samples[0].at < calm_s:
        return Choice(replicas=replicas)  # nobody knows what was needed
    lately = [one for one in samples if now - one.at <= calm_s]
    if sum(one.seconds for one in lately) < calm_s / 2:
        return Choice(replicas=replicas)  # too little was heard: of the other seconds nobody knows
    most = max(needed(rule, one) for one in lately)
    down = max(most, rule.least, 1)
    if down < replicas:
        return Choice(replicas=down, because=f"no more than {most} were needed for {calm_s:g} s")
    zero_s = max(rule.to_zero_after_s, cold_start_s, rule.window_s)
    if replicas == 1 and rule.least == 0 and now - samples[0].at >= zero_s:
        lately = [one for one in samples if now - one.at <= zero_s]
        if not any(one.in_flight or one.queued or one.requests for one in lately):
            return Choice(replicas=0, because=f"no request for {zero_s:g} s")
    return Choice(replicas=replicas)


def needed(rule: Rule, sample: Sample) -> int:
    """Replicas that this second asked for; one at least, if it had a request at all."""
    return _mean_needed(rule, [sample], sample.seconds)


def _mean_needed(rule: Rule, samples: Sequence[Sample], over: float) -> int:
    """The same of the mean of some seconds."""
    in_flight = sum(one.in_flight * one.seconds for one in samples) / over
    queued = sum(one.queued * one.seconds for one in samples) / over
    waiting = ceil(queued / rule.cap)
    counts = {
        Target.CONCURRENCY: ceil((in_flight + queued) / rule.value),
        Target.RPS: ceil(sum(one.requests * one.seconds for one in samples) / over / rule.value) + waiting,
        Target.TOKENS: ceil(sum(one.tokens * one.seconds for one in samples) / over / rule.value) + waiting,
        Target.QUEUE: ceil(in_flight / rule.cap) + ceil(queued / rule.value),
    }
    return max(counts[rule.target], int(bool(in_flight or queued)))


def _needed_now(rule: Rule, samples: Sequence[Sample], now: float) -> int:
    """By the mean of the window; whoever waits at this moment is counted as they are."""
    window = [one for one in samples if now - one.at <= rule.window_s]
    # A second without a word has nothing in it: the mean is of the whole window, not of what was heard.
    over = max(sum(one.seconds for one in window), min(rule.window_s, now - samples[0].at + 1))
    newest = samples[-1]
    is_waited = newest.queued > 0 and now - newest.at <= NEWEST_S
    return max(_mean_needed(rule, window, over), needed(rule, newest) if is_waited else 0)


def _told(rule: Rule, newest: Sample) -> str:
    seen = f"{newest.in_flight} requests there, {newest.queued} waiting"
    return f"{seen}; {rule.target} of {rule.value:g} for each replica"
