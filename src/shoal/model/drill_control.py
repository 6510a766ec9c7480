"""The result of killing the control plane: whether it is back, and whether running jobs noticed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from shoal.model.drill import Drill, DrillOutcome, DrillReport
from shoal.model.drill_measures import measure_goodput, undisturbed_s
from shoal.wire import Progress


def judge_control_drill(
    drill: Drill,
    now: float,
    *,
    back_at: float | None,
    heard_at: float | None,
    num_lost: int,
    over: AbstractSet[str],
    progress: Mapping[str, Progress],
) -> DrillReport | None:
    """The report of the drill. None while it is open.

    `back_at`: when another control plane took over. `heard_at`: when the last supervisor had found it.
    `over`: attempts that have ended since. `progress`: the newest progress of each attempt.
    """
    is_late = now > drill.started_at + drill.within_s
    if back_at is None:
        alive = "the control plane was not killed"
        return DrillReport(outcome=DrillOutcome.NOT_DONE, because=alive, finished_at=now) if is_late else None
    if heard_at is None:
        silent = f"not every supervisor reported within {drill.within_s:g} s"
        return _failed(drill, silent, back_at, now) if is_late else None
    if now < drill.started_at + drill.window_s:
        return None
    if num_lost:
        return _failed(drill, f"{num_lost} of {len(drill.running)} attempts were lost", back_at, now)
    noun = "attempt was" if len(drill.running) == 1 else "attempts were"
    message = f"{len(drill.running)} {noun} found again within {heard_at - drill.started_at:.1f} s"
    ends_at = max(drill.started_at + drill.window_s, heard_at)
    # An attempt that ended within the window stands still for a good reason, so it counts up to its last
    # step.
    ends = {attempt_id: 0.0 if attempt_id in over else ends_at for attempt_id in drill.running}
    rates = [
        rate
        for attempt_id in drill.running
        if (rate := _rate(drill, attempt_id, progress, ends[attempt_id])) is not None
    ]
    num_rates = max(len(rates), 1)
    return DrillReport(
        outcome=DrillOutcome.RECOVERED,
        detail=message if drill.running else "nothing was running",
        noticed_s=back_at - drill.started_at,
        steps_lost=_lost_steps(drill, progress),
        goodput=sum(goodput for goodput, _ in rates) / num_rates if rates else None,
        window_s=sum(window_s for _, window_s in rates) / num_rates if rates else None,
        finished_at=now,
    )


def _rate(
    drill: Drill, attempt_id: str, progress: Mapping[str, Progress], ends_at: float
) -> tuple[float, float] | None:
    """Return `(goodput, window_s)` of one attempt: undisturbed time for its steps since, and the window.

    An attempt that reported steps before and none since has made none in the window.
    """
    before = drill.running[attempt_id]
    after = progress.get(attempt_id, before)
    if before is None or after is None:
        return None
    step_s = undisturbed_s(before.step_s, after.step_s)
    if step_s is None:
        return None
    goodput, window_s = measure_goodput(after.step - before.step, step_s, before.at, after.at, ends_at)
    return None if goodput is None or window_s is None else (goodput, window_s)


def _lost_steps(drill: Drill, progress: Mapping[str, Progress]) -> int | None:
    """Steps by which attempts are behind where they were. None if no attempt reported any."""
    losses = [
        max(0, before.step - progress[attempt_id].step)
        for attempt_id, before in drill.running.items()
        if before is not None and attempt_id in progress
    ]
    return sum(losses) if losses else None


def _failed(drill: Drill, because: str, back_at: float, now: float) -> DrillReport:
    return DrillReport(
        outcome=DrillOutcome.NOT_RECOVERED,
        because=because,
        noticed_s=back_at - drill.started_at,
        finished_at=now,
    )
