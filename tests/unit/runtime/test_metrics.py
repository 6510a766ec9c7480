"""What a rank logs reaches its supervisor, whatever else it sends, and costs nothing where nobody listens."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from shoal import runtime
from shoal.clock import BootClock
from shoal.errors import SpecError
from shoal.runtime import metrics
from shoal.runtime.meter import MAX_AT_ONCE, Meter
from shoal.runtime.metrics import VARIABLE, Line, Rate
from shoal.runtime.tally import LOST, MAX_SERIES, MAX_TOLD, Tally
from shoal.samples import Axis, Point, Samples
from tests.support.shares import SOURCE, an_order


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meter]:
    """A supervisor that listens to this process."""
    made = Meter(an_order(), BootClock())
    monkeypatch.setenv(VARIABLE, made.variable)
    monkeypatch.setattr(metrics, "_voice", None)
    yield made
    made.close()
    monkeypatch.setattr(metrics, "_voice", None)


def test_line_that_is_nested_deeply_is_lost_and_ends_nobody(meter: Meter) -> None:
    fd = int(meter.variable.partition(":")[0])
    os.write(fd, b"\x96\x00\x00\x00\x80\x00" + b"\x91" * 12_000)  # a sixth field, which is passed over
    metrics.log(loss=0.5, step=1)
    assert {"loss", "points_lost"} <= told(meter).keys()


def told(meter: Meter) -> dict[str, Samples]:
    meter.hear()
    return {one.name: one for one in meter.take(is_last=True)}


def line(step: int | None, rank: int = 0, **values: float) -> Line:
    return Line(rank, step, 1000, dict(values))


def test_logged_numbers_are_told_with_their_step(meter: Meter) -> None:
    runtime.log(loss=2.5, step=3)
    runtime.log({"loss/eval": 7}, step=3)
    found = told(meter)
    assert found["loss"] == Samples(name="loss", axis=Axis.STEP, points=(Point(3, 2.5, 2.5, 2.5),), rank=0)
    assert found["loss/eval"].points[0].last == 7.0
    assert meter.take(is_last=True) == ()


def test_without_a_step_it_is_trainings_or_the_time(meter: Meter) -> None:
    runtime.log(lr=0.1)
    metrics.voice().step = 12
    runtime.log(loss=1.0)
    found = told(meter)
    assert (found["lr"].axis, found["loss"].axis) == (Axis.TIME, Axis.STEP)
    assert found["loss"].points[0].x == 12


def test_steps_that_were_logged_are_counted_as_soon_as_they_are_written(meter: Meter) -> None:
    runtime.log(lr=0.1)
    assert meter.steps_heard == 0
    runtime.log(loss=1.0, step=0)
    runtime.log(loss=0.9, step=1)
    assert meter.steps_heard == 2
    for step in range(2 * MAX_AT_ONCE + 7):
        runtime.log(loss=1.0, step=step)
    assert meter.steps_heard == 2 * MAX_AT_ONCE + 9, (
        "all that waits, however much: the next group did none of it"
    )


def test_what_is_not_finite_is_told_as_no_number(meter: Meter) -> None:
    runtime.log(a=math.nan, b=math.inf, c=10**400, step=0)
    assert {point.last for one in told(meter).values() for point in one.points} == {None}


def test_nobody_listens_outside_of_shoal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(metrics, "_voice", None)
    runtime.log(loss=1.0, step=0)
    monkeypatch.setattr(metrics, "_voice", None)


def test_descriptor_that_is_something_else_by_now_is_left_alone(
    meter: Meter, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    inode = meter.variable.partition(":")[2]
    monkeypatch.setenv(VARIABLE, f"{write}:{inode}")
    runtime.log(loss=1.0, step=0)
    os.close(write)
    assert os.read(read, 100) == b""
    os.close(read)


@pytest.mark.parametrize("name", ["", " loss", "a\nb", "\x1b[2J", "x" * 101])
def test_name_that_no_table_can_show_is_refused_where_it_is_written(name: str) -> None:
    with pytest.raises(SpecError, match="cannot name a metric"):
        runtime.log({name: 1.0}, step=0)


@pytest.mark.parametrize("step", [-1, 1 << 53])
def test_step_that_no_axis_has_is_refused(step: int) -> None:
    with pytest.raises(SpecError, match=f"step={step} is too (small|great); pass"):
        runtime.log(loss=1.0, step=step)


def test_too_many_values_at_once_are_refused() -> None:
    with pytest.raises(SpecError, match="65 values in one call"):
        runtime.log({f"m{at}": 1.0 for at in range(65)}, step=0)


def test_flood_is_dropped_with_a_count_and_the_last_word_is_heard(meter: Meter) -> None:
    for step in range(20_000):
        runtime.log(loss=float(step), step=step)
    while meter.hear():
        pass
    metrics.voice()._flush()
    found = told(meter)
    assert found["loss"].points[-1].x == 19_999
    assert (found[LOST].points[-1].last or 0.0) > 0
    assert found[LOST].rank is None


def test_rank_that_is_killed_loses_nothing_it_said(meter: Meter) -> None:
    program = (
        "import os, signal\nfrom shoal import runtime\n"
        "for step in range(50): runtime.log(loss=step, step=step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "PYTHONPATH": SOURCE, VARIABLE: meter.variable}
    done = subprocess.run([sys.executable, "-c", program], env=environment, pass_fds=(meter.fd,), check=False)
    assert done.returncode == -signal.SIGKILL
    assert [point.x for point in told(meter)["loss"].points] == list(range(50))


def test_logging_needs_no_torch() -> None:
    program = "import sys; from shoal import runtime; runtime.log(loss=1); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff",
        msgspec.msgpack.encode(["0", 1, 2, {}]),
        msgspec.msgpack.encode([0, 1, 2, {"a": "b"}]),
        msgspec.msgpack.encode([7, 1, 2, {"another node's rank": 1.0}]),
        msgspec.msgpack.encode([0, -1, 2, {"a": 1.0}]),
        msgspec.msgpack.encode([0, 1 << 60, 2, {"a": 1.0}]),
        msgspec.msgpack.encode([0, 1, 2, {"a\x1b[2J": 1.0}]),
    ],
)
def test_what_makes_no_sense_is_counted_and_harms_nobody(meter: Meter, garbage: bytes) -> None:
    os.write(meter.fd, garbage)
    runtime.log(loss=1.0, step=0)
    found = told(meter)
    assert found["loss"].points[0].last == 1.0
    assert set(found) == {"loss", LOST}


def test_rate_counts_steps_since_it_was_last_told() -> None:
    rate = Rate()
    assert rate.seen(10, 100.0) is None
    assert rate.seen(11, 100.1) is None
    assert rate.seen(20, 102.0) == 5.0
    assert rate.seen(20, 104.0) is None
    assert rate.seen(3, 105.0) is None, "steps are made again"
    assert rate.seen(5, 107.0) == 1.0


def test_of_ranks_that_log_one_name_the_lowest_counts() -> None:
    tally = Tally(range(2, 4))
    tally.hear(line(1, rank=3, loss=3.0, other=3.0))
    tally.hear(line(1, rank=2, loss=2.0))
    tally.hear(line(2, rank=3, loss=3.0))
    found = {one.name: one for one in tally.take(0)}
    assert (found["loss"].rank, [point.last for point in found["loss"].points]) == (2, [2.0])
    assert found["other"].rank == 3


def test_newest_is_told_where_steps_are_made_again_and_outlives_a_lost_message() -> None:
    tally = Tally(range(1))
    for step in (8, 9, 3):
        tally.hear(line(step, loss=float(step)))
    (lost,) = tally.take(0)
    assert (lost.points[-1].x, lost.newest) == (9, Point(3, 3.0, 3.0, 3.0))
    tally.put_back((lost,))
    assert tally.take(0) == (lost,)
    tally.put_back((lost,))
    tally.hear(line(4, loss=4.0))
    assert tally.take(0)[0].newest == Point(4, 4.0, 4.0, 4.0)


def test_what_nobody_heard_is_told_again_before_what_came_since() -> None:
    tally = Tally(range(1))
    tally.hear(line(1, loss=1.0))
    lost = tally.take(0)
    tally.hear(line(1, loss=9.0))
    tally.hear(line(2, loss=2.0))
    tally.put_back(lost)
    assert [(point.x, point.last) for point in tally.take(0)[0].points] == [(1, 9.0), (2, 2.0)]


def test_message_is_bounded_however_much_was_logged() -> None:
    tally = Tally(range(1))
    for step in range(300):
        for at in range(0, MAX_SERIES + 20, 50):
            tally.hear(Line(0, step, 1000, {f"m{at + one}": float(step) for one in range(50)}))
    found = tally.take(0)
    ours = [one for one in found if one.rank is not None]
    assert len(ours) == MAX_SERIES
    assert sum(len(one.points) for one in found) <= MAX_TOLD + MAX_SERIES
    assert all((one.points[-1].last, one.points[0].low) == (299.0, 0.0) for one in ours)
