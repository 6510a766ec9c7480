"""Measures of a drill: goodput, and whether the ranks crash in a loop. Pure.

Goodput is the part of the time in which a job made the steps that it makes undisturbed. Ranks that begin
again after a drill and keep ending have not recovered.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shoal.model.attempt import Attempt, AttemptState, EndReason
from shoal.model.job import Job, JobOutcome


def measure_goodput(
    steps: int, step_s: float, began_at: float, newest_at: float, ends_at: float
) -> tuple[float | None, float | None]:
    """Return `(goodput, window_s)`: undisturbed time for `steps` steps divided by the window.

    `newest_at` is the time of the last of these steps. The window ends at `ends_at`, so time without a step
    counts. If the newest step is later, the window ends with it. If the next step may be under way at
    `ends_at`, the window also ends with the newest step, so that step is neither counted nor charged.
    """
    is_standing = newest_at < ends_at - step_s
    window_s = (ends_at if is_standing else newest_at) - began_at
    if window_s <= 0.0:
        return None, None
    return min(1.0, max(0, steps) * step_s / window_s), window_s


def undisturbed_s(before_s: float | None, after_s: float | None) -> float | None:
    """The faster of the two paces. Measured against a slow start alone, any later pace would look
    undisturbed.
    """
    return min((pace for pace in (before_s, after_s) if pace), default=None)


MAX_ENDED = 2
"""After more new failures of the ranks than this, waiting for another one is useless."""
PROGRAM_FAILED = frozenset({EndReason.EXIT, EndReason.SIGNAL, EndReason.OOM, EndReason.SETUP})
_PLACE = re.compile(r'^\s*File "([^"]+)", line (\d+)', re.MULTILINE)


def count_new_failures(attempts: Sequence[Attempt], rendezvous_round: int, *, is_of_ranks: bool) -> int:
    """How often the ranks failed again since the first of `attempts` was drilled in this rendezvous round.

    `is_of_ranks`: the drill's act was itself a failure of ranks, and is not counted. Lost tasks and attempts
    that the cluster ended are not counted either.
    """
    first, *others = attempts
    lost = sum(replacement.rendezvous_round >= rendezvous_round for replacement in first.replacements)
    failures = first.rendezvous_round - rendezvous_round - lost - first.num_excused + _has_failed(first)
    failures += sum(attempt.restarts + _has_failed(attempt) for attempt in others)
    return max(0, failures - is_of_ranks)


def is_crash_loop(job: Job, count: int) -> bool:
    """Whether to report a crash loop now. `count`: see `num_ended`."""
    return count >= MAX_ENDED or (count > 0 and job.outcome is JobOutcome.FAILED)


def crash_loop_sentence(attempts: Sequence[Attempt], count: int) -> str:
    """How often the ranks failed, and why the last time, in one line."""
    times = "once more" if count == 1 else f"{count} more times"
    message = _last_message(attempts)
    return f"its ranks failed {times}{': ' if message else ''}{message}"


def _has_failed(attempt: Attempt) -> bool:
    return attempt.state is AttemptState.ENDED and attempt.reason in PROGRAM_FAILED


def _last_message(attempts: Sequence[Attempt]) -> str:
    for attempt in reversed(attempts):
        if _has_failed(attempt):
            return shortened(attempt.message)
        if attempt.failure is not None:
            return shortened(attempt.failure.message)
    return ""


def shortened(message: str) -> str:
    """A failure's first line and its last line, which names the exception, with the place where it was
    raised.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if len(lines) < 2:
        return "".join(lines)
    places = _PLACE.findall(message)
    where = f" ({places[-1][0]}:{places[-1][1]})" if places else ""
    return f"{lines[0]}: {lines[-1]}{where}"
