"""Logged metrics reach the supervisor, whatever else a rank sends, and cost nothing outside of Shoal."""

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
from shoal.curve import Axis, Point, Samples
from shoal.errors import SpecError
from shoal.runtime import metrics
from shoal.runtime.metrics import METRICS_VARIABLE, MetricLine, StepRate
from shoal.runtime.process.meter import (
    LOST_SERIES,
    MAX_AT_ONCE,
    MAX_MESSAGE_POINTS,
    MAX_SERIES,
    Meter,
    MetricsBuffer,
)
from tests.support.runtime.tasks import SOURCE, a_task_spec


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meter]:
    """A supervisor that receives what this process logs."""
    new_meter = Meter(a_task_spec().ranks, a_task_spec().resources, BootClock())
    monkeypatch.setenv(METRICS_VARIABLE, new_meter.variable)
    monkeypatch.setattr(metrics, "_channel", None)
    yield new_meter
    new_meter.close()
    monkeypatch.setattr(metrics, "_channel", None)


def test_deeply_nested_metric_line_is_dropped(meter: Meter) -> None:
    fd = int(meter.variable.partition(":")[0])
    os.write(fd, b"\x96\x00\x00\x00\x80\x00" + b"\x91" * 12_000)  # a sixth field, which is ignored
    metrics.log(loss=0.5, step=1)
    assert {"loss", "points_lost"} <= samples_of(meter).keys()


def samples_of(meter: Meter) -> dict[str, Samples]:
    meter.receive()
    return {series.name: series for series in meter.take(is_last=True)}


def line(step: int | None, rank: int = 0, **values: float) -> MetricLine:
    return MetricLine(rank, step, 1000, dict(values))


def test_logged_numbers_are_reported_with_their_step(meter: Meter) -> None:
    runtime.log(loss=2.5, step=3)
    runtime.log({"loss/eval": 7}, step=3)
    samples = samples_of(meter)
    assert samples["loss"] == Samples(name="loss", axis=Axis.STEP, points=(Point(3, 2.5, 2.5, 2.5),), rank=0)
    assert samples["loss/eval"].points[0].last == 7.0
    assert meter.take(is_last=True) == ()


def test_without_a_step_trainings_step_or_the_time_counts(meter: Meter) -> None:
    runtime.log(lr=0.1)
    metrics.metric_channel().step = 12
    runtime.log(loss=1.0)
    samples = samples_of(meter)
    assert (samples["lr"].axis, samples["loss"].axis) == (Axis.TIME, Axis.STEP)
    assert samples["loss"].points[0].x == 12


def test_steps_that_were_logged_are_counted_as_soon_as_they_are_written(meter: Meter) -> None:
    runtime.log(lr=0.1)
    assert meter.steps_logged == 0
    runtime.log(loss=1.0, step=0)
    runtime.log(loss=0.9, step=1)
    assert meter.steps_logged == 2
    for step in range(2 * MAX_AT_ONCE + 7):
        runtime.log(loss=1.0, step=step)
    assert meter.steps_logged == 2 * MAX_AT_ONCE + 9, (
        "all waiting messages count, however many, because none of them is the next group's"
    )


def test_value_that_is_not_finite_is_reported_as_none(meter: Meter) -> None:
    runtime.log(a=math.nan, b=math.inf, c=10**400, step=0)
    assert {point.last for one in samples_of(meter).values() for point in one.points} == {None}


def test_log_outside_of_shoal_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(METRICS_VARIABLE, raising=False)
    monkeypatch.setattr(metrics, "_channel", None)
    runtime.log(loss=1.0, step=0)
    monkeypatch.setattr(metrics, "_channel", None)


def test_reused_descriptor_number_is_not_written_to(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    inode = meter.variable.partition(":")[2]
    monkeypatch.setenv(METRICS_VARIABLE, f"{write}:{inode}")
    runtime.log(loss=1.0, step=0)
    os.close(write)
    assert os.read(read, 100) == b""
    os.close(read)


@pytest.mark.parametrize("name", ["", " loss", "a\nb", "\x1b[2J", "x" * 101])
def test_name_that_no_table_can_show_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match="cannot name a metric"):
        runtime.log({name: 1.0}, step=0)


@pytest.mark.parametrize("step", [-1, 1 << 53])
def test_step_beyond_the_axis_is_refused(step: int) -> None:
    with pytest.raises(SpecError, match=f"step={step} is too (small|great); pass"):
        runtime.log(loss=1.0, step=step)


def test_too_many_values_at_once_are_refused() -> None:
    with pytest.raises(SpecError, match="65 values in one call"):
        runtime.log({f"m{at}": 1.0 for at in range(65)}, step=0)


def test_flood_of_metrics_is_dropped_and_counted_and_the_last_value_arrives(meter: Meter) -> None:
    for step in range(20_000):
        runtime.log(loss=float(step), step=step)
    while meter.receive():
        pass
    metrics.metric_channel()._flush()
    samples = samples_of(meter)
    assert samples["loss"].points[-1].x == 19_999
    assert (samples[LOST_SERIES].points[-1].last or 0.0) > 0
    assert samples[LOST_SERIES].rank is None


def test_killed_rank_loses_no_logged_value(meter: Meter) -> None:
    program = (
        "import os, signal\nfrom shoal import runtime\n"
        "for step in range(50): runtime.log(loss=step, step=step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "PYTHONPATH": SOURCE, METRICS_VARIABLE: meter.variable}
    done = subprocess.run([sys.executable, "-c", program], env=environment, pass_fds=(meter.fd,), check=False)
    assert done.returncode == -signal.SIGKILL
    assert [point.x for point in samples_of(meter)["loss"].points] == list(range(50))


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
def test_invalid_metric_message_is_counted_and_ignored(meter: Meter, garbage: bytes) -> None:
    os.write(meter.fd, garbage)
    runtime.log(loss=1.0, step=0)
    samples = samples_of(meter)
    assert samples["loss"].points[0].last == 1.0
    assert set(samples) == {"loss", LOST_SERIES}


def test_rate_counts_steps_since_the_last_report() -> None:
    rate = StepRate()
    assert rate.update(10, 100.0) is None
    assert rate.update(11, 100.1) is None
    assert rate.update(20, 102.0) == 5.0
    assert rate.update(20, 104.0) is None
    assert rate.update(3, 105.0) is None, "steps are repeated"
    assert rate.update(5, 107.0) == 1.0


def test_metric_of_the_lowest_rank_counts() -> None:
    tally = MetricsBuffer(range(2, 4))
    tally.add_line(line(1, rank=3, loss=3.0, other=3.0))
    tally.add_line(line(1, rank=2, loss=2.0))
    tally.add_line(line(2, rank=3, loss=3.0))
    by_name = {one.name: one for one in tally.take(0)}
    assert (by_name["loss"].rank, [point.last for point in by_name["loss"].points]) == (2, [2.0])
    assert by_name["other"].rank == 3


def test_newest_value_of_repeated_steps_is_reported_after_a_lost_message() -> None:
    tally = MetricsBuffer(range(1))
    for step in (8, 9, 3):
        tally.add_line(line(step, loss=float(step)))
    (lost,) = tally.take(0)
    assert (lost.points[-1].x, lost.newest) == (9, Point(3, 3.0, 3.0, 3.0))
    tally.put_back((lost,))
    assert tally.take(0) == (lost,)
    tally.put_back((lost,))
    tally.add_line(line(4, loss=4.0))
    assert tally.take(0)[0].newest == Point(4, 4.0, 4.0, 4.0)


def test_unacknowledged_samples_are_reported_again_before_newer_ones() -> None:
    tally = MetricsBuffer(range(1))
    tally.add_line(line(1, loss=1.0))
    lost = tally.take(0)
    tally.add_line(line(1, loss=9.0))
    tally.add_line(line(2, loss=2.0))
    tally.put_back(lost)
    assert [(point.x, point.last) for point in tally.take(0)[0].points] == [(1, 9.0), (2, 2.0)]


def test_message_is_bounded_for_any_number_of_values() -> None:
    tally = MetricsBuffer(range(1))
    for step in range(300):
        for at in range(0, MAX_SERIES + 20, 50):
            tally.add_line(MetricLine(0, step, 1000, {f"m{at + one}": float(step) for one in range(50)}))
    samples = tally.take(0)
    ours = [one for one in samples if one.rank is not None]
    assert len(ours) == MAX_SERIES
    assert sum(len(one.points) for one in samples) <= MAX_MESSAGE_POINTS + MAX_SERIES
    assert all((one.points[-1].last, one.points[0].low) == (299.0, 0.0) for one in ours)
