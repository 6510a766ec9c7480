"""How many replicas of each release a service should have: load, rollout and bounds together. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shoal.control.services.snapshot import ServiceActivity, ServiceSnapshot
from shoal.model.service import Rollout, RolloutStage, Service
from shoal.serving.scaling import autoscaler
from shoal.serving.scaling import rollout as rolling
from shoal.serving.scaling.replica_steps import ObservedReplica
from shoal.spec.service import ServiceSpec


class DesiredReplicas(msgspec.Struct, frozen=True, kw_only=True):
    service: Service
    """The service with the decisions about it."""
    counts: dict[int, int]
    """By release."""
    because: str = ""
    """Why there should be more or fewer replicas than before."""


def desired_replicas(
    snapshot: ServiceSnapshot,
    service: Service,
    activity: ServiceActivity,
    replicas: Sequence[ObservedReplica],
    now: float,
) -> DesiredReplicas:
    """Return the desired replicas. `service`: as recorded, plus what this turn has already found out."""
    if service.stop_asked_by is not None:
        return DesiredReplicas(service=service, counts={})
    rule = scaling_rule(snapshot.spec(service.live), service)
    choice = autoscaler.decide(
        rule,
        service.replicas,
        activity.samples,
        activity.at,
        changed_s=max(0.0, now - service.scaled_at),
        cold_start_s=service.cold_start_s,
    )
    if choice.because:
        service = service.resized(choice.replicas, choice.because, now)
    is_rolling = service.rollout is not None and service.rollout.is_open
    is_asleep = not is_rolling and autoscaler.should_sleep(
        rule, service.replicas, activity.samples, activity.at, is_asleep=service.is_asleep
    )
    service = msgspec.structs.replace(service, is_asleep=is_asleep)
    if service.rollout is None or not service.rollout.is_open:
        after, counts = _settled(snapshot, service, replicas)
        return DesiredReplicas(service=after, counts=counts, because=choice.because)
    after, counts = _rolled(snapshot, service, service.rollout, activity, replicas, now)
    because = choice.because if after.replicas == service.replicas else after.resizes[-1].because
    return DesiredReplicas(service=after, counts=counts, because=because)


def scaling_rule(spec: ServiceSpec, service: Service) -> autoscaler.ScalingRule:
    scale = spec.scale
    return autoscaler.ScalingRule(
        target=autoscaler.ScalingMetric(scale.target),
        value=scale.value,
        cap=spec.cap,
        least=service.min_replicas,
        most=service.max_replicas,
        window_s=scale.window,
        cooldown_s=scale.cooldown,
        to_zero_after_s=scale.to_zero_after,
        sleep_after_s=scale.sleep_after,
    )


def rollout_rule(spec: ServiceSpec) -> rolling.RolloutRule:
    rollout = spec.rollout
    return rolling.RolloutRule(
        steps=tuple(percent / 100 for percent in rollout.steps),
        bake_s=rollout.bake,
        error_rate=rollout.rollback_on.error_rate,
        latency=rollout.rollback_on.latency,
        requests=rollout.rollback_on.requests,
        max_unavailable=rollout.max_unavailable,
    )


def _rolled(
    snapshot: ServiceSnapshot,
    service: Service,
    rollout: Rollout,
    activity: ServiceActivity,
    replicas: Sequence[ObservedReplica],
    now: float,
) -> tuple[Service, dict[int, int]]:
    serving = [replica for replica in replicas if replica.draining_s is None and not replica.failing]
    fleet = rolling.ReplicaCounts(
        wanted=service.replicas,
        old=sum(replica.release != rollout.new for replica in serving),
        old_ready=sum(replica.release != rollout.new and replica.is_ready for replica in serving),
        new_ready=sum(replica.release == rollout.new and replica.is_ready for replica in serving),
        new_failures=rollout.failures,
        has_no_room=bool(rollout.waits),
    )
    where = rolling.RolloutProgress(
        stage=rolling.RolloutPhase(rollout.stage),
        step=rollout.step,
        baked_s=None if rollout.baking_at is None else activity.watched_s,
    )
    rule = rollout_rule(snapshot.spec(rollout.new))
    next_step = rolling.decide(rule, where, fleet, activity.old_stats, activity.new_stats)
    after = _updated_rollout(rollout, next_step, now)
    after = msgspec.structs.replace(after, waits=_waiting_reason(rollout, next_step, serving))
    live = rollout.new if after.stage is RolloutStage.DONE else service.live
    counts = {**_counts_before(rollout, next_step.old, serving), rollout.new: next_step.new}
    if after.stage is RolloutStage.ROLLED_BACK:
        return service.rolled_back(after, now), counts
    return msgspec.structs.replace(service, rollout=after, live=live), counts


def _settled(
    snapshot: ServiceSnapshot, service: Service, replicas: Sequence[ObservedReplica]
) -> tuple[Service, dict[int, int]]:
    """Return all replicas of the release that serves. Of a release that was rolled back, keep as many as the
    serving release still lacks.
    """
    rollout, counts = service.rollout, {service.live: service.replicas}
    serving = [replica for replica in replicas if replica.draining_s is None and not replica.failing]
    live = [replica for replica in serving if replica.release == service.live]
    others = [replica for replica in serving if replica.release != service.live and replica.is_ready]
    if rollout is None or not (others or rollout.waits):
        return service, counts
    waits = next((replica.waits for replica in live if replica.waits), "")
    if not waits and len(live) < service.replicas:
        waits = rollout.waits
    stay = rolling.num_kept_serving(
        rollout_rule(snapshot.spec(rollout.new)),
        service.replicas,
        ready=sum(replica.is_ready for replica in live),
        others=len(others),
        is_hopeless=rollout.share == 0.0,
        has_no_room=bool(waits),
    )
    after = msgspec.structs.replace(rollout, waits=waits if others else "")
    return msgspec.structs.replace(service, rollout=after), {**_count_by_release(stay, others), **counts}


def _waiting_reason(
    rollout: Rollout, next_step: rolling.RolloutPlan, serving: Sequence[ObservedReplica]
) -> str:
    """Return why there is no room: the first reason, as long as there is none."""
    new = [replica for replica in serving if replica.release == rollout.new]
    why = next((replica.waits for replica in new if replica.waits), "")
    if not why and len(new) < next_step.new:
        return rollout.waits  # not even a job could be made of it, or the attempt to do so is recent
    return (rollout.waits or why) if why else ""


def _counts_before(rollout: Rollout, count: int, serving: Sequence[ObservedReplica]) -> dict[int, int]:
    """Return how many replicas of earlier releases stay, including a release whose own rollout this one has
    overtaken.
    """
    counts = _count_by_release(count, [replica for replica in serving if replica.release != rollout.new])
    return {**counts, rollout.old: counts.get(rollout.old, 0) + count - sum(counts.values())}


def _count_by_release(count: int, replicas: Sequence[ObservedReplica]) -> dict[int, int]:
    """Return at most `count` of these replicas, by release, the oldest release first."""
    counts: dict[int, int] = {}
    for release in sorted({replica.release for replica in replicas}):
        counts[release] = min(count, sum(replica.release == release for replica in replicas))
        count -= counts[release]
    return counts


def _updated_rollout(before: Rollout, next_step: rolling.RolloutPlan, now: float) -> Rollout:
    is_moved = (before.stage, before.step) != (RolloutStage(next_step.stage), next_step.step)
    baking_at = None if is_moved else before.baking_at
    if next_step.is_baking and baking_at is None and not is_moved:
        baking_at = now
    return msgspec.structs.replace(
        before,
        stage=RolloutStage(next_step.stage),
        step=next_step.step,
        share=next_step.share,
        since=now if is_moved else before.since,
        baking_at=baking_at,
        because=next_step.because,
    )
