"""Rollouts of any size with replicas that come and go as they like: nobody is left without a server."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from shoal.serving.life import Seen, decide
from shoal.serving.rollout import PATIENCE, Fleet, Next, Rule, Stage, Where, kept
from shoal.serving.rollout import decide as roll
from shoal.serving.traffic import Stats

OLD, NEW = 1, 2
BEGUN = Next(stage=Stage.ROLLING)


class Park:
    """Replicas under the real decisions; a turn lets some become ready and some be gone."""

    def __init__(self, wanted: int, seed: int, *, room: int | None = None) -> None:
        self.dice = random.Random(seed)
        self.wanted = wanted
        self.room = room or 1 << 30
        """How many can run, also of those that drain."""
        self.next = wanted + 1
        self.replicas = {
            n: Seen(replica_id=str(n), release=OLD, slot=n, is_ready=True) for n in range(1, self.next)
        }
        self.where = Where(stage=Stage.ROLLING)

    def told(self, stats: Stats) -> Next:
        serving = [one for one in self.replicas.values() if one.draining_s is None]
        fleet = Fleet(
            wanted=self.wanted,
            old=sum(one.release == OLD for one in serving),
            old_ready=sum(one.release == OLD and one.is_ready for one in serving),
            new_ready=sum(one.release == NEW and one.is_ready for one in serving),
            has_no_room=len(self.replicas) > self.room,
        )
        return roll(Rule(bake_s=0.0), self.where, fleet, Stats(), stats)

    def turn(self, stats: Stats | None = None) -> Next:
        told = self.told(stats or Stats())
        steps = decide(
            {OLD: told.old, NEW: told.new}, list(self.replicas.values()), drain_s=5.0, may_start=True
        )
        again = decide(
            {OLD: told.old, NEW: told.new},
            self.after(steps.start, steps.drain, steps.stop),
            drain_s=5.0,
            may_start=True,
        )
        assert again.is_nothing, "what was done is not done twice"
        baked = 0.0 if told.is_baking else None
        same = (told.stage, told.step) == (self.where.stage, self.where.step)
        self.where = Where(stage=told.stage, step=told.step, baked_s=baked if same else None)
        return told

    def after(
        self, start: tuple[int, ...], drain: tuple[str, ...], stop: tuple[tuple[str, str], ...]
    ) -> list[Seen]:
        for release in start:
            self.replicas[self.next] = Seen(replica_id=str(self.next), release=release, slot=self.next)
            self.next += 1
        for number, one in list(self.replicas.items()):
            if one.replica_id in dict(stop):
                del self.replicas[number]
            elif one.replica_id in drain:
                self.replicas[number] = _with(one, draining_s=0.0)
        return list(self.replicas.values())

    def pass_time(self) -> None:
        for number, one in list(self.replicas.items()):
            if one.draining_s is not None:
                is_idle = self.dice.random() < 0.5
                self.replicas[number] = _with(one, draining_s=one.draining_s + 1.0, is_idle=is_idle)
            elif not one.is_ready and self.held < self.room and self.dice.random() < 0.5:
                self.replicas[number] = _with(one, is_ready=True)

    @property
    def held(self) -> int:
        return sum(one.is_ready or one.draining_s is not None for one in self.replicas.values())

    @property
    def ready(self) -> int:
        return sum(one.is_ready and one.draining_s is None for one in self.replicas.values())

    @property
    def running(self) -> int:
        return sum(one.draining_s is None for one in self.replicas.values())


def _with(
    one: Seen, *, is_ready: bool | None = None, draining_s: float | None = None, is_idle: bool = False
) -> Seen:
    return Seen(
        replica_id=one.replica_id,
        release=one.release,
        slot=one.slot,
        is_ready=one.is_ready if is_ready is None else is_ready,
        draining_s=draining_s,
        is_idle=is_idle,
    )


@given(st.integers(0, 8), st.integers(0, 1 << 30))
def test_rolling_keeps_as_many_ready_as_there_should_be_and_one_more_at_most(wanted: int, seed: int) -> None:
    park, told = Park(wanted, seed), BEGUN
    for _ in range(400):
        told = park.turn()
        assert park.ready >= wanted
        assert park.running <= wanted + 1
        if told.stage is Stage.DONE:
            break
        park.pass_time()
    assert told.stage is Stage.DONE
    assert {one.release for one in park.replicas.values() if one.draining_s is None} <= {NEW}


@given(st.integers(2, 8), st.integers(0, 1 << 30))
def test_rolling_without_room_for_one_more_misses_one_at_most(wanted: int, seed: int) -> None:
    park, told = Park(wanted, seed, room=wanted), BEGUN
    for _ in range(400):
        told = park.turn()
        assert park.ready >= wanted - 1
        if told.stage is Stage.DONE:
            break
        park.pass_time()
    assert told.stage is Stage.DONE


@given(st.integers(0, 1 << 30))
def test_only_replica_is_not_taken_down_where_there_is_no_room_for_another(seed: int) -> None:
    park = Park(1, seed, room=1)
    for _ in range(50):
        assert park.turn().stage is Stage.ROLLING
        assert park.ready == 1
        park.pass_time()


@given(st.integers(1, 8), st.integers(0, 1 << 30))
def test_canary_keeps_every_old_one_until_its_last_step_and_then_rolls(wanted: int, seed: int) -> None:
    park, told = Park(wanted, seed), BEGUN
    park.where = Where(stage=Stage.CANARY)
    shares = []
    for _ in range(600):
        told = park.turn()
        assert park.ready >= wanted
        if told.stage is Stage.CANARY:
            assert told.old == wanted
            shares.append(told.share or 0.0)
        if told.stage is Stage.DONE:
            break
        park.pass_time()
    assert told.stage is Stage.DONE
    assert shares == sorted(shares)
    assert {0.05, 0.25, 0.5} <= {*shares}


@given(st.integers(1, 8), st.integers(0, 1 << 30), st.integers(1, 60), st.sampled_from(Stage))
def test_release_that_fails_goes_back_from_wherever_it_is(
    wanted: int, seed: int, after: int, stage: Stage
) -> None:
    park = Park(wanted, seed)
    park.where = Where(stage=stage if stage in (Stage.ROLLING, Stage.CANARY) else Stage.ROLLING)
    for _ in range(after):
        if park.turn().stage is Stage.DONE:
            return
        park.pass_time()
    told = park.turn(Stats(requests=100, errors=30))
    assert told.stage is Stage.ROLLED_BACK
    assert (told.old, told.new) == (wanted, 0)
    assert "30.0%" in told.because


@given(st.integers(1, 8), st.integers(0, 1 << 30), st.integers(1, 60), st.booleans())
def test_way_back_keeps_as_many_ready_as_there_should_be(
    wanted: int, seed: int, after: int, has_room: bool
) -> None:
    park = Park(wanted, seed)
    for _ in range(after):
        if park.turn().stage is Stage.DONE:
            return
        park.pass_time()
    if not has_room:
        park.room = len(park.replicas)
    for _ in range(400):
        serving = [one for one in park.replicas.values() if one.draining_s is None]
        stay = kept(
            Rule(),
            wanted,
            ready=sum(one.release == OLD and one.is_ready for one in serving),
            others=sum(one.release == NEW and one.is_ready for one in serving),
            is_hopeless=False,
            has_no_room=len(park.replicas) > park.room,
        )
        steps = decide({OLD: wanted, NEW: stay}, list(park.replicas.values()), drain_s=5.0, may_start=True)
        park.after(steps.start, steps.drain, steps.stop)
        assert park.ready >= wanted - (0 if has_room else 1)
        park.pass_time()
    assert {one.release for one in park.replicas.values()} == {OLD}
    assert park.ready == wanted


def test_release_that_answers_nothing_goes_at_once_where_there_is_an_old_one() -> None:
    fleet = Fleet(wanted=8, old=1, old_ready=1, new_ready=7)
    told = roll(Rule(), Where(stage=Stage.ROLLING), fleet, Stats(), Stats(requests=100, errors=95))
    assert told.share == 0.0
    assert kept(Rule(), 8, ready=1, others=7, is_hopeless=True, has_no_room=False) == 0
    assert kept(Rule(), 8, ready=0, others=7, is_hopeless=True, has_no_room=False) == 7
    told = roll(Rule(), Where(stage=Stage.ROLLING), fleet, Stats(), Stats(requests=100, errors=30))
    assert told.share is None


def test_canary_goes_on_with_enough_requests_or_much_later_without() -> None:
    fleet = Fleet(wanted=8, old=8, old_ready=8, new_ready=4)

    def step_after(baked_s: float, requests: int) -> Next:
        where = Where(stage=Stage.CANARY, step=2, baked_s=baked_s)
        return roll(Rule(), where, fleet, Stats(requests=requests), Stats(requests=requests))

    assert step_after(61.0, 0).stage is Stage.CANARY
    assert step_after(61.0, 19).stage is Stage.CANARY
    assert step_after(61.0, 20).stage is Stage.ROLLING
    assert step_after(59.0, 1000).stage is Stage.CANARY
    assert step_after(60.0 * PATIENCE, 0).stage is Stage.ROLLING
