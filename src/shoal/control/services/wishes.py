"""How many replicas of which release a service should have: load, rollout and bounds together. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shoal.control.services.look import Look, View
from shoal.model.service import Rollout, Service, Stage
from shoal.serving import rollout as rolling
from shoal.serving import scaling
from shoal.serving.life import Seen
from shoal.spec.service import ServiceSpec


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    service: Service
    """With what was decided about it."""
    counts: dict[int, int]
    """By release."""
    because: str = ""
    """Why there should be more or fewer than before."""


def wish(look: Look, service: Service, known: View, seen: Sequence[Seen], now: float) -> Wish:
    """`service`: as recorded, but for what this turn has found out already."""
    if service.stop_asked_by is not None:
        return Wish(service=service, counts={})
    rule = scaling_rule(look.spec(service.live), service)
    choice = scaling.decide(
        rule,
        service.replicas,
        known.samples,
        known.at,
        changed_s=max(0.0, now - service.scaled_at),
        cold_start_s=service.cold_start_s,
    )
    if choice.because:
        service = service.resized(choice.replicas, choice.because, now)
    is_rolling = service.rollout is not None and service.rollout.is_open
    is_asleep = not is_rolling and scaling.should_sleep(
        rule, service.replicas, known.samples, known.at, is_asleep=service.is_asleep
    )
    service = msgspec.structs.replace(service, is_asleep=is_asleep)
    if service.rollout is None or not service.rollout.is_open:
        after, counts = _settled(look, service, seen)
        return Wish(service=after, counts=counts, because=choice.because)
    after, counts = _rolled(look, service, service.rollout, known, seen, now)
    because = choice.because if after.replicas == service.replicas else after.resizes[-1].because
    return Wish(service=after, counts=counts, because=because)


def scaling_rule(spec: ServiceSpec, service: Service) -> scaling.Rule:
    asked = spec.scale
    return scaling.Rule(
        target=scaling.Target(asked.target),
        value=asked.value,
        cap=spec.cap,
        least=service.min_replicas,
        most=service.max_replicas,
        window_s=asked.window,
        cooldown_s=asked.cooldown,
        to_zero_after_s=asked.to_zero_after,
        sleep_after_s=asked.sleep_after,
    )


def rollout_rule(spec: ServiceSpec) -> rolling.Rule:
    asked = spec.rollout
    return rolling.Rule(
        steps=tuple(percent / 100 for percent in asked.steps),
        bake_s=asked.bake,
        error_rate=asked.rollback_on.error_rate,
        latency=asked.rollback_on.latency,
        requests=asked.rollback_on.requests,
        max_unavailable=asked.max_unavailable,
    )


def _rolled(
    look: Look, service: Service, rollout: Rollout, known: View, seen: Sequence[Seen], now: float
) -> tuple[Service, dict[int, int]]:
    serving = [one for one in seen if one.draining_s is None and not one.failing]
    fleet = rolling.Fleet(
        wanted=service.replicas,
        old=sum(one.release != rollout.new for one in serving),
        old_ready=sum(one.release != rollout.new and one.is_ready for one in serving),
        new_ready=sum(one.release == rollout.new and one.is_ready for one in serving),
        new_failures=rollout.failures,
        has_no_room=bool(rollout.waits),
    )
    where = rolling.Where(
        stage=rolling.Stage(rollout.stage),
        step=rollout.step,
        baked_s=None if rollout.baking_at is None else known.watched_s,
    )
    rule = rollout_rule(look.spec(rollout.new))
    told = rolling.decide(rule, where, fleet, known.old_stats, known.new_stats)
    after = _recorded(rollout, told, now)
    after = msgspec.structs.replace(after, waits=_waits(rollout, told, serving))
    live = rollout.new if after.stage is Stage.DONE else service.live
    counts = {**_kept(rollout, told.old, serving), rollout.new: told.new}
    if after.stage is Stage.ROLLED_BACK:
        return service.taken_back(after, now), counts
    return msgspec.structs.replace(service, rollout=after, live=live), counts


def _settled(look: Look, service: Service, seen: Sequence[Seen]) -> tuple[Service, dict[int, int]]:
    """All of the release that serves. Of one that was taken back, as many as that one misses meanwhile."""
    rollout, counts = service.rollout, {service.live: service.replicas}
    serving = [one for one in seen if one.draining_s is None and not one.failing]
    own = [one for one in serving if one.release == service.live]
    others = [one for one in serving if one.release != service.live and one.is_ready]
    if rollout is None or not (others or rollout.waits):
        return service, counts
    waits = next((one.waits for one in own if one.waits), "")
    if not waits and len(own) < service.replicas:
        waits = rollout.waits
    stay = rolling.kept(
        rollout_rule(look.spec(rollout.new)),
        service.replicas,
        ready=sum(one.is_ready for one in own),
        others=len(others),
        is_hopeless=rollout.share == 0.0,
        has_no_room=bool(waits),
    )
    after = msgspec.structs.replace(rollout, waits=waits if others else "")
    return msgspec.structs.replace(service, rollout=after), {**_spread(stay, others), **counts}


def _waits(rollout: Rollout, told: rolling.Next, serving: Sequence[Seen]) -> str:
    """Why there is no room: as it was first said, for as long as there is none."""
    new = [one for one in serving if one.release == rollout.new]
    why = next((one.waits for one in new if one.waits), "")
    if not why and len(new) < told.new:
        return rollout.waits  # not even a job could be made of it, or that was only just tried
    return (rollout.waits or why) if why else ""


def _kept(rollout: Rollout, count: int, serving: Sequence[Seen]) -> dict[int, int]:
    """So many of what was there before: also of a release whose own rollout this one has overtaken."""
    counts = _spread(count, [one for one in serving if one.release != rollout.new])
    return {**counts, rollout.old: counts.get(rollout.old, 0) + count - sum(counts.values())}


def _spread(count: int, there: Sequence[Seen]) -> dict[int, int]:
    """So many of them at most, by release, of the oldest first."""
    counts: dict[int, int] = {}
    for release in sorted({one.release for one in there}):
        counts[release] = min(count, sum(one.release == release for one in there))
        count -= counts[release]
    return counts


def _recorded(before: Rollout, told: rolling.Next, now: float) -> Rollout:
    is_moved = (before.stage, before.step) != (Stage(told.stage), told.step)
    baking_at = None if is_moved else before.baking_at
    if told.is_baking and baking_at is None and not is_moved:
        baking_at = now
    return msgspec.structs.replace(
        before,
        stage=Stage(told.stage),
        step=told.step,
        share=told.share,
        since=now if is_moved else before.since,
        baking_at=baking_at,
        because=told.because,
    )
