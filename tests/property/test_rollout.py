"""Rollouts of any size, with replicas that start and stop at any time: some replica always serves."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from shoal.serving.scaling.replica_steps import ObservedReplica, decide
from shoal.serving.scaling.rollout import (
    PATIENCE,
    ReplicaCounts,
    RolloutPhase,
    RolloutPlan,
    RolloutProgress,
    RolloutRule,
    num_kept_serving,
)
from shoal.serving.scaling.rollout import decide as roll
from shoal.serving.scaling.traffic import Stats

OLD, NEW = 1, 2
BEGUN = RolloutPlan(stage=RolloutPhase.ROLLING)


class Park:
    """Replicas under the real decisions. A turn lets some become ready and some disappear."""

    def __init__(self, wanted: int, seed: int, *, room: int | None = None) -> None:
        self.dice = random.Random(seed)
        self.wanted = wanted
        self.room = room or 1 << 30
        """How many can run, including those that drain."""
        self.next = wanted + 1
        self.replicas = {
            n: ObservedReplica(replica_id=str(n), release=OLD, slot=n, is_ready=True)
            for n in range(1, self.next)
        }
        self.where = RolloutProgress(stage=RolloutPhase.ROLLING)

    def told(self, stats: Stats) -> RolloutPlan:
        serving = [replica for replica in self.replicas.values() if replica.draining_s is None]
        fleet = ReplicaCounts(
            wanted=self.wanted,
            old=sum(replica.release == OLD for replica in serving),
            old_ready=sum(replica.release == OLD and replica.is_ready for replica in serving),
            new_ready=sum(replica.release == NEW and replica.is_ready for replica in serving),
            has_no_room=len(self.replicas) > self.room,
        )
        return roll(RolloutRule(bake_s=0.0), self.where, fleet, Stats(), stats)

    def turn(self, stats: Stats | None = None) -> RolloutPlan:
        rollout_plan = self.told(stats or Stats())
        steps = decide(
            {OLD: rollout_plan.old, NEW: rollout_plan.new},
            list(self.replicas.values()),
            drain_s=5.0,
            may_start=True,
        )
        again = decide(
            {OLD: rollout_plan.old, NEW: rollout_plan.new},
            self.after(steps.start, steps.drain, steps.stop),
            drain_s=5.0,
            may_start=True,
        )
        assert again.is_nothing, "what was done is not done twice"
        baked = 0.0 if rollout_plan.is_baking else None
        same = (rollout_plan.stage, rollout_plan.step) == (self.where.stage, self.where.step)
        self.where = RolloutProgress(
            stage=rollout_plan.stage, step=rollout_plan.step, baked_s=baked if same else None
        )
        return rollout_plan

    def after(
        self, start: tuple[int, ...], drain: tuple[str, ...], stop: tuple[tuple[str, str], ...]
    ) -> list[ObservedReplica]:
        for release in start:
            self.replicas[self.next] = ObservedReplica(
                replica_id=str(self.next), release=release, slot=self.next
            )
            self.next += 1
        for number, replica in list(self.replicas.items()):
            if replica.replica_id in dict(stop):
                del self.replicas[number]
            elif replica.replica_id in drain:
                self.replicas[number] = _with(replica, draining_s=0.0)
        return list(self.replicas.values())

    def pass_time(self) -> None:
        for number, replica in list(self.replicas.items()):
            if replica.draining_s is not None:
                is_idle = self.dice.random() < 0.5
                self.replicas[number] = _with(replica, draining_s=replica.draining_s + 1.0, is_idle=is_idle)
            elif not replica.is_ready and self.held < self.room and self.dice.random() < 0.5:
                self.replicas[number] = _with(replica, is_ready=True)

    @property
    def held(self) -> int:
        return sum(replica.is_ready or replica.draining_s is not None for replica in self.replicas.values())

    @property
    def ready(self) -> int:
        return sum(replica.is_ready and replica.draining_s is None for replica in self.replicas.values())

    @property
    def running(self) -> int:
        return sum(replica.draining_s is None for replica in self.replicas.values())


def _with(
    one: ObservedReplica,
    *,
    is_ready: bool | None = None,
    draining_s: float | None = None,
    is_idle: bool = False,
) -> ObservedReplica:
    return ObservedReplica(
        replica_id=one.replica_id,
        release=one.release,
        slot=one.slot,
        is_ready=one.is_ready if is_ready is None else is_ready,
        draining_s=draining_s,
        is_idle=is_idle,
    )


@given(st.integers(0, 8), st.integers(0, 1 << 30))
def test_rolling_keeps_the_wanted_number_ready_and_one_more_at_most(wanted: int, seed: int) -> None:
    park, rollout_plan = Park(wanted, seed), BEGUN
    for _ in range(400):
        rollout_plan = park.turn()
        assert park.ready >= wanted
        assert park.running <= wanted + 1
        if rollout_plan.stage is RolloutPhase.DONE:
            break
        park.pass_time()
    assert rollout_plan.stage is RolloutPhase.DONE
    assert {replica.release for replica in park.replicas.values() if replica.draining_s is None} <= {NEW}


@given(st.integers(2, 8), st.integers(0, 1 << 30))
def test_rolling_without_room_for_an_extra_replica_misses_one_at_most(wanted: int, seed: int) -> None:
    park, rollout_plan = Park(wanted, seed, room=wanted), BEGUN
    for _ in range(400):
        rollout_plan = park.turn()
        assert park.ready >= wanted - 1
        if rollout_plan.stage is RolloutPhase.DONE:
            break
        park.pass_time()
    assert rollout_plan.stage is RolloutPhase.DONE


@given(st.integers(0, 1 << 30))
def test_only_replica_is_not_stopped_if_there_is_no_room_for_another(seed: int) -> None:
    park = Park(1, seed, room=1)
    for _ in range(50):
        assert park.turn().stage is RolloutPhase.ROLLING
        assert park.ready == 1
        park.pass_time()


@given(st.integers(1, 8), st.integers(0, 1 << 30))
def test_canary_keeps_every_old_replica_until_its_last_step_and_then_rolls(wanted: int, seed: int) -> None:
    park, rollout_plan = Park(wanted, seed), BEGUN
    park.where = RolloutProgress(stage=RolloutPhase.CANARY)
    shares = []
    for _ in range(600):
        rollout_plan = park.turn()
        assert park.ready >= wanted
        if rollout_plan.stage is RolloutPhase.CANARY:
            assert rollout_plan.old == wanted
            shares.append(rollout_plan.share or 0.0)
        if rollout_plan.stage is RolloutPhase.DONE:
            break
        park.pass_time()
    assert rollout_plan.stage is RolloutPhase.DONE
    assert shares == sorted(shares)
    assert {0.05, 0.25, 0.5} <= {*shares}


@given(st.integers(1, 8), st.integers(0, 1 << 30), st.integers(1, 60), st.sampled_from(RolloutPhase))
def test_failing_release_is_rolled_back_from_any_stage(
    wanted: int, seed: int, after: int, stage: RolloutPhase
) -> None:
    park = Park(wanted, seed)
    park.where = RolloutProgress(
        stage=stage if stage in (RolloutPhase.ROLLING, RolloutPhase.CANARY) else RolloutPhase.ROLLING
    )
    for _ in range(after):
        if park.turn().stage is RolloutPhase.DONE:
            return
        park.pass_time()
    rollout_plan = park.turn(Stats(requests=100, errors=30))
    assert rollout_plan.stage is RolloutPhase.ROLLED_BACK
    assert (rollout_plan.old, rollout_plan.new) == (wanted, 0)
    assert "30.0%" in rollout_plan.because


@given(st.integers(1, 8), st.integers(0, 1 << 30), st.integers(1, 60), st.booleans())
def test_rollback_keeps_the_wanted_number_ready(wanted: int, seed: int, after: int, has_room: bool) -> None:
    park = Park(wanted, seed)
    for _ in range(after):
        if park.turn().stage is RolloutPhase.DONE:
            return
        park.pass_time()
    if not has_room:
        park.room = len(park.replicas)
    for _ in range(400):
        serving = [replica for replica in park.replicas.values() if replica.draining_s is None]
        stay = num_kept_serving(
            RolloutRule(),
            wanted,
            ready=sum(replica.release == OLD and replica.is_ready for replica in serving),
            others=sum(replica.release == NEW and replica.is_ready for replica in serving),
            is_hopeless=False,
            has_no_room=len(park.replicas) > park.room,
        )
        steps = decide({OLD: wanted, NEW: stay}, list(park.replicas.values()), drain_s=5.0, may_start=True)
        park.after(steps.start, steps.drain, steps.stop)
        assert park.ready >= wanted - (0 if has_room else 1)
        park.pass_time()
    assert {replica.release for replica in park.replicas.values()} == {OLD}
    assert park.ready == wanted


def test_release_without_answers_is_rolled_back_at_once_if_an_old_one_exists() -> None:
    fleet = ReplicaCounts(wanted=8, old=1, old_ready=1, new_ready=7)
    rollout_plan = roll(
        RolloutRule(),
        RolloutProgress(stage=RolloutPhase.ROLLING),
        fleet,
        Stats(),
        Stats(requests=100, errors=95),
    )
    assert rollout_plan.share == 0.0
    assert num_kept_serving(RolloutRule(), 8, ready=1, others=7, is_hopeless=True, has_no_room=False) == 0
    assert num_kept_serving(RolloutRule(), 8, ready=0, others=7, is_hopeless=True, has_no_room=False) == 7
    rollout_plan = roll(
        RolloutRule(),
        RolloutProgress(stage=RolloutPhase.ROLLING),
        fleet,
        Stats(),
        Stats(requests=100, errors=30),
    )
    assert rollout_plan.share is None


def test_canary_advances_with_enough_requests_or_after_a_long_time_without() -> None:
    fleet = ReplicaCounts(wanted=8, old=8, old_ready=8, new_ready=4)

    def step_after(baked_s: float, requests: int) -> RolloutPlan:
        where = RolloutProgress(stage=RolloutPhase.CANARY, step=2, baked_s=baked_s)
        return roll(RolloutRule(), where, fleet, Stats(requests=requests), Stats(requests=requests))

    assert step_after(61.0, 0).stage is RolloutPhase.CANARY
    assert step_after(61.0, 19).stage is RolloutPhase.CANARY
    assert step_after(61.0, 20).stage is RolloutPhase.ROLLING
    assert step_after(59.0, 1000).stage is RolloutPhase.CANARY
    assert step_after(60.0 * PATIENCE, 0).stage is RolloutPhase.ROLLING
