"""What came of killing the control plane: whether it is back, and whether what ran noticed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from shoal.model.drill import Drill, DrillOutcome, DrillResult
from shoal.model.goodput import rate, undisturbed_s
from shoal.wire import Progress


def judge_control(
    drill: Drill,
    now: float,
    *,
    back_at: float | None,
    heard_at: float | None,
    num_lost: int,
    over: AbstractSet[str],
    progress: Mapping[str, Progress],
) -> DrillResult | None:
    """None while it is open. `back_at`: when another one took over; `heard_at`: when the last supervisor had
    found it; `over`: attempts that ended since; `progress`: the newest, by attempt.
    """
    is_late = now > drill.started_at + drill.within_s
    if back_at is None:
        alive = "the control plane was not killed"
        return DrillResult(outcome=DrillOutcome.NOT_DONE, because=alive, finished_at=now) if is_late else None
    if heard_at is None:
        silent = f"not every supervisor was heard from within {drill.within_s:g} s"
        return _failed(drill, silent, back_at, now) if is_late else None
    if now < drill.started_at + drill.window_s:
        return None
    if num_lost:
        return _failed(drill, f"{num_lost} of {len(drill.running)} attempts were lost", back_at, now)
    found = "attempt was" if len(drill.running) == 1 else "attempts were"
    told = f"{len(drill.running)} {found} found again within {heard_at - drill.started_at:.1f} s"
    ends_at = max(drill.started_at + drill.window_s, heard_at)
    # Whoever came to its end in the window stands still for good reason: it counts up to its last step.
    ends = {own: 0.0 if own in over else ends_at for own in drill.running}
    rates = [one for own in drill.running if (one := _rate(drill, own, progress, ends[own])) is not None]
    num_rates = max(len(rates), 1)
    return DrillResult(
        outcome=DrillOutcome.RECOVERED,
        told=told if drill.running else "nothing was running",
        noticed_s=back_at - drill.started_at,
        steps_lost=_lost(drill, progress),
        goodput=sum(goodput for goodput, _ in rates) / num_rates if rates else None,
        window_s=sum(window_s for _, window_s in rates) / num_rates if rates else None,
        finished_at=now,
    )


def _rate(
    drill: Drill, attempt_id: str, progress: Mapping[str, Progress], ends_at: float
) -> tuple[float, float] | None:
    """Of one attempt: the steps it made since, times what one takes undisturbed, over the time; and that.

    One that told of steps before and of none since has made none in all that time.
    """
    before = drill.running[attempt_id]
    after = progress.get(attempt_id, before)
    if before is None or after is None:
        return None
    step_s = undisturbed_s(before.step_s, after.step_s)
    if step_s is None:
        return None
    goodput, window_s = rate(after.step - before.step, step_s, before.at, after.at, ends_at)
    return None if goodput is None or window_s is None else (goodput, window_s)


def _lost(drill: Drill, progress: Mapping[str, Progress]) -> int | None:
    """Steps by which attempts are behind where they were; None where nobody told of any."""
    told = [
        max(0, before.step - progress[own].step)
        for own, before in drill.running.items()
        if before is not None and own in progress
    ]
    return sum(told) if told else None


def _failed(drill: Drill, because: str, back_at: float, now: float) -> DrillResult:
    return DrillResult(
        outcome=DrillOutcome.NOT_RECOVERED,
        because=because,
        noticed_s=back_at - drill.started_at,
        finished_at=now,
    )
