"""Why a job is not running, or why nothing is done about one that is silent."""

from __future__ import annotations

from shoal.control.core import Core
from shoal.control.frozen import spec_of
from shoal.control.leases import FENCE_MARGIN_S, QUIET_S
from shoal.control.snapshot import age
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import Job
from shoal.scheduler import Explanation, Why, explain_unmet


def explain(core: Core, job: Job, attempt: Attempt) -> Explanation | None:
    """None when there is nothing to explain: it runs and is heard from, or it has ended."""
    if attempt.state is AttemptState.QUEUED:
        blocked = core.queue.blocked(job.job_id)
        if blocked is not None:
            return explain_unmet(blocked)
        known = core.told.explanations.get(attempt.attempt_id)
        return known or Explanation(
            attempt_id=attempt.attempt_id,
            job_id=job.job_id,
            why=Why.BEHIND,
            sentence="it is about to be looked at: the scheduler has not planned since it was queued",
        )
    if attempt.state is AttemptState.ENDED:
        return None
    silent_s = core.leases.longest_silence_s(attempt)
    return _unreachable(job, attempt, silent_s) if silent_s > QUIET_S else None


def _unreachable(job: Job, attempt: Attempt, silent_s: float) -> Explanation:
    fence_s = spec_of(job).fence + FENCE_MARGIN_S
    nodes = ", ".join(attempt.nodes_left)
    return Explanation(
        attempt_id=attempt.attempt_id,
        job_id=job.job_id,
        why=Why.UNREACHABLE,
        sentence=f"no sign of life from {nodes} for {age(silent_s)}; unreachable is not dead",
        details=(f"nothing is started in its place without evidence, or before {age(fence_s)} of silence",),
        hint=f"if you know that it is off: `shoal nodes declare-dead {attempt.nodes_left[0]}`",
        facts={"silent_s": silent_s, "fence_s": fence_s, "nodes": list(attempt.nodes_left)},
    )
