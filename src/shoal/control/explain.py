"""Why a job is not running, has fewer nodes than it could use, or is silent and left alone."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from shoal.control.core import Core
from shoal.control.frozen import spec_of
from shoal.control.leases import FENCE_MARGIN_S, QUIET_S
from shoal.engines.base import CANNOT_ASK, SupportsClearing
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import Job
from shoal.scheduler import Explanation, Why
from shoal.scheduler.words import age

STATE = re.compile(r" is ([A-Z_]+(?: \([^)]*\))?)")
"""A cluster's own word for where something is, and its reason: `PENDING (Resources)`."""


def explain(core: Core, job: Job, attempts: Sequence[Attempt]) -> Explanation | None:
    """None when there is nothing to explain: it runs with all it could use and is heard from, or has ended.

    `attempts` are the job's, oldest first: why one is tried again is part of why it waits.
    """
    *earlier, attempt = attempts
    if attempt.state is AttemptState.QUEUED:
        told = core.planner.explain(attempt.attempt_id, core.clock.now())
        if _is_first_answer_awaited(core) and (told is None or told.why is Why.NO_NODES):
            return _with_history(_unanswered(core, job, attempt), earlier)
        told = told or _not_planned(job, attempt)
        if told.why is Why.DEPENDENCY:
            return told
        return _with_history(core.nodes.with_gone(told, job.request), earlier)
    if attempt.state is AttemptState.ENDED:
        return None
    if attempt.orphans_left:
        return _orphaned(core, job, attempt, attempt.orphans_left)
    if is_kept_here(core, attempt):
        return _with_history(_kept_here(core, job, attempt), earlier)
    silent = core.leases.silent_nodes(attempt, QUIET_S)
    if silent:
        return _unreachable(core, job, attempt, silent)
    if attempt.state is AttemptState.RUNNING and attempt.nodes_to_start:
        return _replacing(job, attempt)
    troubles = _troubles(core, attempt)
    if troubles:
        return _with_history(_not_begun(core, job, attempt, troubles), earlier)
    return core.planner.explain_growth(attempt.attempt_id, core.clock.now())


def without_guess(told: Explanation, job: Job) -> Explanation:
    """A hint that a rehearsal has replaced is not told: what would start the job is known by then."""
    is_rehearsed = told.why in (Why.BEHIND, Why.TOPOLOGY, Why.WINDOW) or (
        told.why is Why.RESOURCES and job.request.min_nodes > 1
    )
    return msgspec.structs.replace(told, hint=None) if is_rehearsed else told


def _troubles(core: Core, attempt: Attempt) -> tuple[str, ...]:
    """Why a cluster does not answer is for operators, as its own words may name machines: `shoal status` has
    it for them. What it says of a job while it answers is for whoever may read the job.
    """
    if attempt.state is not AttemptState.STARTING:
        return ()
    return core.leases.troubles(attempt.attempt_id, has_whole=core.outages.told is None)


def _with_history(told: Explanation, earlier: Sequence[Attempt]) -> Explanation:
    if not earlier:
        return told
    last = earlier[-1]
    how = f"attempt {last.epoch} ended: {last.reason}"
    details = (*told.details, f"{how}: {last.message}" if last.message else how)
    return msgspec.structs.replace(told, details=details)


def _not_planned(job: Job, attempt: Attempt) -> Explanation:
    return Explanation(
        attempt_id=attempt.attempt_id,
        job_id=job.job_id,
        why=Why.BEHIND,
        sentence="it is about to be looked at: the scheduler has not planned since it was queued",
    )


def _is_first_answer_awaited(core: Core) -> bool:
    return core.outages.present is not None and not core.outages.present.has_answered


def _unanswered(core: Core, job: Job, attempt: Attempt) -> Explanation:
    """What nobody could look at is not `no nodes`, and no plan is about to be made without it."""
    cluster = core.engine.name.capitalize()
    return Explanation(
        attempt_id=attempt.attempt_id,
        job_id=job.job_id,
        why=Why.NO_NODES,
        sentence=f"it waits for the {cluster}, which has not answered since this control plane started",
        details=("whether it can ever run there is looked at when that answers",),
        hint="`shoal status` says since when, and to operators why",
        facts={"in_short": "cluster away"},
    )


def _not_begun(core: Core, job: Job, attempt: Attempt, troubles: tuple[str, ...]) -> Explanation:
    in_short = _in_short(core, attempt)
    return Explanation(
        attempt_id=attempt.attempt_id,
        job_id=job.job_id,
        why=Why.NOT_BEGUN,
        sentence=f"it was placed on {', '.join(attempt.node_names)} and has not begun yet",
        details=troubles,
        facts={"in_short": in_short} if in_short else {},
    )


def is_kept_here(core: Core, attempt: Attempt) -> bool:
    """Its engine does not answer, and has nothing of it, or has not said so yet: nobody on its nodes could be
    silent.
    """
    is_unknown = attempt.state is AttemptState.STARTING and attempt.native_id is None
    if core.outages.told is None or not is_unknown or attempt.started_nodes:
        return False
    return core.leases.is_unheard_of(attempt, is_being_handed_over=attempt.attempt_id in core.submitting)


def _kept_here(core: Core, job: Job, attempt: Attempt) -> Explanation:
    """Nothing is wrong with its nodes: nobody there has heard of it."""
    cluster = core.engine.name.capitalize()
    return Explanation(
        attempt_id=attempt.attempt_id,
        job_id=job.job_id,
        why=Why.NOT_BEGUN,
        sentence=f"not handed to the {cluster} yet: it does not answer",
        details=(f"it is handed over when the {cluster} answers",),
        hint="`shoal status` says since when, and to operators why",
        facts={"in_short": "cluster away"},
    )


def _in_short(core: Core, attempt: Attempt) -> str:
    """What its cluster lets it wait for, for a column of a table; empty: it does not wait there."""
    told = next(iter(core.leases.waits(attempt.attempt_id)), "")
    if told.startswith(CANNOT_ASK):
        return "cluster away"
    state = STATE.search(told)
    return f"{core.engine.name}: {state[1]}" if state else ""


def _replacing(job: Job, attempt: Attempt) -> Explanation:
    last, nodes = attempt.replacements[-1], ", ".join(attempt.nodes_to_start)
    return Explanation(
        attempt_id=attempt.attempt_id,
        job_id=job.job_id,
        why=Why.NOT_BEGUN,
        sentence=f"its share on {last.lost.node} was lost; another begins on {nodes}, and the others wait",
        details=(f"{last.lost.node}: {last.lost.message}",),
    )


def _orphaned(core: Core, job: Job, attempt: Attempt, nodes: tuple[str, ...]) -> Explanation:
    words = core.leases.troubles(attempt.attempt_id) or ((attempt.message,) if attempt.message else ())
    return Explanation(
        attempt_id=attempt.attempt_id,
        job_id=job.job_id,
        why=Why.ORPHANED,
        sentence=f"its supervisor on {', '.join(nodes)} is dead or silent, and what it left may still run",
        details=(*words, "nothing is started in its place, however long that takes, until it is gone"),
        hint=_way_out(core, nodes[0]),
        facts={"nodes": list(nodes)},
    )


def _if_off(core: Core, node: str) -> str:
    """An operator's word counts once its cluster does not contradict it any more."""
    told = f"if you know that it is off: `shoal nodes declare-dead {node}`"
    if core.outages.present is not None or not core.nodes.is_alive(node):
        return told
    return f"{told}, once its cluster has noticed, too: `shoal nodes` calls it silent then"


def _way_out(core: Core, node: str) -> str:
    """What helps where something does not die. Nobody else may ever say a word of a machine that is gone."""
    ways = [f"look on {node} for processes that do not die: `ps -eo pid,stat,args`; a restart ends them"]
    if isinstance(core.engine, SupportsClearing):
        ways.append(core.engine.how_to_clear(node))
    if core.outages.present is not None or not core.nodes.is_alive(node):
        ways.append(f"if it is off for good: `shoal nodes declare-dead {node}`")
    return "; ".join(way for way in ways if way)


def _unreachable(core: Core, job: Job, attempt: Attempt, silent: tuple[str, ...]) -> Explanation:
    fence_s = spec_of(job).fence + FENCE_MARGIN_S
    left_s = core.leases.fence_left_s(attempt, silent, spec_of(job).fence)
    silent_s = max(core.leases.share_silence_s(attempt, node) for node in silent)
    nodes = ", ".join(silent)
    troubles = "; ".join(_troubles(core, attempt))
    rule = f"nothing is started in its place without evidence, or before {age(fence_s)} of silence"
    return Explanation(
        attempt_id=attempt.attempt_id,
        job_id=job.job_id,
        why=Why.UNREACHABLE,
        sentence=f"no sign of life from {nodes} for {age(silent_s)}; unreachable is not dead",
        details=(f"it has not begun: {troubles}", rule) if troubles else (rule,),
        hint=_if_off(core, silent[0]),
        facts={"silent_s": silent_s, "fence_s": fence_s, "fence_left_s": left_s, "nodes": list(silent)},
    )
