"""Whether ranks that began again after a drill keep ending, which is no recovery. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shoal.model.attempt import Attempt, AttemptState, EndReason
from shoal.model.job import Job, JobOutcome

MAX_ENDED = 2
"""After so many more failures of the ranks nobody needs to wait for another one."""
PROGRAM_FAILED = frozenset({EndReason.EXIT, EndReason.SIGNAL, EndReason.OOM, EndReason.SETUP})
_PLACE = re.compile(r'^\s*File "([^"]+)", line (\d+)', re.MULTILINE)


def num_ended(attempts: Sequence[Attempt], generation: int, *, is_of_ranks: bool) -> int:
    """How often the ranks failed again, since the first of `attempts` was drilled in its group `generation`.

    `is_of_ranks`: what the drill did was itself a failure of the ranks, and is not counted. Lost shares and
    attempts that the cluster ended are not either.
    """
    first, *others = attempts
    lost = sum(one.generation >= generation for one in first.replacements)
    failures = first.generation - generation - lost - first.excused + _has_failed(first)
    failures += sum(attempt.restarts + _has_failed(attempt) for attempt in others)
    return max(0, failures - is_of_ranks)


def is_crash_loop(job: Job, count: int) -> bool:
    """Whether to say so now. `count`: see `num_ended`."""
    return count >= MAX_ENDED or (count > 0 and job.outcome is JobOutcome.FAILED)


def told(attempts: Sequence[Attempt], count: int) -> str:
    """How often, and why the last time, in one line."""
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
    """A failure's first line and its last one, which names the exception, with the place it was raised at."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if len(lines) < 2:
        return "".join(lines)
    places = _PLACE.findall(message)
    where = f" ({places[-1][0]}:{places[-1][1]})" if places else ""
    return f"{lines[0]}: {lines[-1]}{where}"
