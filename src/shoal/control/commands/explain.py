"""Why a job does not run, has fewer nodes than it could use, or is silent and left alone; and when it will
start.

Predictions are worked out in a thread beside the event loop, and starts calibrate them. The facts are copied
on the loop: 20 ms at 12,500 nodes and 50,000 waiting jobs, and less than 1 ms on clusters of ordinary size. A
thread does everything else, one question at a time, each with a bound on its work.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from math import inf

import anyio
import msgspec

from shoal.clock import Clock
from shoal.control.actor import SHOAL, Actor
from shoal.control.capabilities import EngineLink, Planning
from shoal.control.job_specs import spec_of
from shoal.control.memory.health import EngineOutages
from shoal.control.memory.leases import FENCE_MARGIN_S, QUIET_S
from shoal.control.memory.planner_input import PlannerNodes
from shoal.control.memory.running import RunningAttempts
from shoal.engines.base import CLUSTER_UNREACHABLE, Engine, SupportsClearing, SupportsOwnQueue
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import Job
from shoal.scheduler import Explanation, Planner, WaitReason
from shoal.scheduler.explain.text import age
from shoal.scheduler.prediction.calibration import Interval
from shoal.scheduler.prediction.changes import START_IT
from shoal.scheduler.prediction.outlook import Outlook, OutlookBasis, outlooks, with_cluster_queue
from shoal.scheduler.prediction.scenarios import StartSpan, predict
from shoal.scheduler.prediction.sooner import suggest_changes

NATIVE_STATE = re.compile(r" is ([A-Z_]+(?: \([^)]*\))?)")
"""A cluster's own word for a task's state, and its reason: `PENDING (Resources)`."""


def explain(
    clock: Clock,
    running: RunningAttempts,
    planning: Planning,
    link: EngineLink,
    job: Job,
    attempts: Sequence[Attempt],
) -> Explanation | None:
    """Return None if there is nothing to explain: the job runs with all it could use and is not silent, or
    has ended.

    `attempts`: all attempts of the job, oldest first. The end of an earlier attempt is part of the
    explanation.
    """
    *earlier, attempt = attempts
    if attempt.state is AttemptState.QUEUED:
        explanation = planning.planner.explain(attempt.attempt_id, clock.now())
        if _is_first_answer_awaited(link.outages) and (
            explanation is None or explanation.why is WaitReason.NO_NODES
        ):
            return _with_history(_unanswered(link.engine, job, attempt), earlier)
        explanation = explanation or _not_planned(job, attempt)
        if explanation.why is WaitReason.DEPENDENCY:
            return explanation
        return _with_history(planning.nodes.with_missing_nodes(explanation, job.request), earlier)
    if attempt.state is AttemptState.ENDED:
        return None
    if attempt.orphans_left:
        return _orphaned(running, planning.nodes, link, job, attempt, attempt.orphans_left)
    if is_not_handed_over(running, link.outages, attempt):
        return _with_history(_not_handed_over(link.engine, job, attempt), earlier)
    is_running = attempt.state is AttemptState.RUNNING
    not_replaced = _not_replaced(running, planning.planner, job, attempt) if is_running else None
    if not_replaced is not None:
        return not_replaced
    silent = running.leases.silent_nodes(attempt, QUIET_S)
    if silent:
        return _unreachable(running, planning.nodes, link.outages, job, attempt, silent)
    if attempt.state is AttemptState.RUNNING and attempt.nodes_to_start:
        return _replacing(job, attempt)
    troubles = _troubles(running, link.outages, attempt)
    if troubles:
        return _with_history(_not_begun(running, link.engine, job, attempt, troubles), earlier)
    return planning.planner.explain_growth(attempt.attempt_id, clock.now())


def without_hint(explanation: Explanation, job: Job) -> Explanation:
    """Drop the hint if an outlook has replaced it: the outlook knows what would start the job."""
    is_rehearsed = explanation.why in (WaitReason.BEHIND, WaitReason.TOPOLOGY, WaitReason.WINDOW) or (
        explanation.why is WaitReason.RESOURCES and job.request.min_nodes > 1
    )
    return msgspec.structs.replace(explanation, hint=None) if is_rehearsed else explanation


def _troubles(running: RunningAttempts, outages: EngineOutages, attempt: Attempt) -> tuple[str, ...]:
    """Return the troubles to show. Why a cluster does not answer is for operators, because its words may name
    machines: `shoal status` shows it to them. What an answering cluster says of a job is for everybody who
    may read the job.
    """
    if attempt.state is not AttemptState.STARTING:
        return ()
    return running.leases.troubles(attempt.attempt_id, has_whole=outages.reported is None)


def _with_history(explanation: Explanation, earlier: Sequence[Attempt]) -> Explanation:
    if not earlier:
        return explanation
    last = earlier[-1]
    how = f"attempt {last.epoch} ended: {last.reason}"
    details = (*explanation.details, f"{how}: {last.message}" if last.message else how)
    return msgspec.structs.replace(explanation, details=details)


def _not_planned(job: Job, attempt: Attempt) -> Explanation:
    return Explanation(
        attempt_id=attempt.attempt_id,
        job_id=job.job_id,
        why=WaitReason.BEHIND,
        sentence="it is about to be looked at: the scheduler has not planned since it was queued",
    )


def _is_first_answer_awaited(outages: EngineOutages) -> bool:
    return outages.current is not None and not outages.current.has_answered


def _unanswered(engine: Engine, job: Job, attempt: Attempt) -> Explanation:
    """Explain a job while the cluster has not answered at all. That is not `no nodes`, and no plan is made
    without the nodes.
    """
    cluster = engine.name.capitalize()
    return Explanation(
        attempt_id=attempt.attempt_id,
        job_id=job.job_id,
        why=WaitReason.NO_NODES,
        sentence=f"it waits for the {cluster}, which has not answered since this control plane started",
        details=("whether it can ever run there is looked at when that answers",),
        hint="`shoal status` says since when, and to operators why",
        facts={"in_short": "cluster away"},
    )


def _not_begun(
    running: RunningAttempts, engine: Engine, job: Job, attempt: Attempt, troubles: tuple[str, ...]
) -> Explanation:
    in_short = _short_reason(running, engine, attempt)
    return Explanation(
        attempt_id=attempt.attempt_id,
        job_id=job.job_id,
        why=WaitReason.NOT_BEGUN,
        sentence=f"it was placed on {', '.join(attempt.node_names)} and has not begun yet",
        details=troubles,
        facts={"in_short": in_short} if in_short else {},
    )


def is_not_handed_over(running: RunningAttempts, outages: EngineOutages, attempt: Attempt) -> bool:
    """Whether the engine does not answer and has no task of the attempt, or has not said so. No node could be
    silent then.
    """
    is_unknown = attempt.state is AttemptState.STARTING and attempt.native_id is None
    if outages.reported is None or not is_unknown or attempt.started_nodes:
        return False
    return running.leases.is_not_handed_over(
        attempt, is_being_handed_over=attempt.attempt_id in running.submitting
    )


def _not_handed_over(engine: Engine, job: Job, attempt: Attempt) -> Explanation:
    """Explain that the attempt could not be handed over. Its nodes are fine and do not know of it."""
    cluster = engine.name.capitalize()
    return Explanation(
        attempt_id=attempt.attempt_id,
        job_id=job.job_id,
        why=WaitReason.NOT_BEGUN,
        sentence=f"not handed to the {cluster} yet: it does not answer",
        details=(f"it is handed over when the {cluster} answers",),
        hint="`shoal status` says since when, and to operators why",
        facts={"in_short": "cluster away"},
    )


def _short_reason(running: RunningAttempts, engine: Engine, attempt: Attempt) -> str:
    """Return the cluster's reason for a table column; empty if the attempt does not wait in the cluster's
    queue.
    """
    reason = next(iter(running.leases.queue_reasons(attempt.attempt_id)), "")
    if reason.startswith(CLUSTER_UNREACHABLE):
        return "cluster away"
    state = NATIVE_STATE.search(reason)
    return f"{engine.name}: {state[1]}" if state else ""


def _replacing(job: Job, attempt: Attempt) -> Explanation:
    last, nodes = attempt.replacements[-1], ", ".join(attempt.nodes_to_start)
    return Explanation(
        attempt_id=attempt.attempt_id,
        job_id=job.job_id,
        why=WaitReason.NOT_BEGUN,
        sentence=f"its task on {last.lost.node} was lost; another begins on {nodes}, and the others wait",
        details=(f"{last.lost.node}: {last.lost.message}",),
    )


def _not_replaced(
    running: RunningAttempts, planner: Planner, job: Job, attempt: Attempt
) -> Explanation | None:
    """Explain why no other node has taken over a lost task; None if no lost task of the attempt waits."""
    explanation = planner.explain_loss(attempt.attempt_id)
    if explanation is not None:
        lost = f"its task on {explanation.facts['lost_node']} was lost, and no other node can take it over"
        return msgspec.structs.replace(explanation, sentence=f"{lost}: {explanation.sentence}")
    lost_task = running.lost_tasks.get(attempt.attempt_id)
    if lost_task is None:
        return None
    outcome = lost_task.outcome
    return Explanation(
        attempt_id=attempt.attempt_id,
        job_id=job.job_id,
        why=WaitReason.NOT_BEGUN,
        sentence=f"its task on {outcome.node} was lost; the next plan looks for another node",
        details=(f"{outcome.node}: {outcome.message}",),
        facts={"lost_node": outcome.node},
    )


def _orphaned(
    running: RunningAttempts,
    planner_nodes: PlannerNodes,
    link: EngineLink,
    job: Job,
    attempt: Attempt,
    nodes: tuple[str, ...],
) -> Explanation:
    troubles = running.leases.troubles(attempt.attempt_id) or ((attempt.message,) if attempt.message else ())
    return Explanation(
        attempt_id=attempt.attempt_id,
        job_id=job.job_id,
        why=WaitReason.ORPHANED,
        sentence=f"its supervisor on {', '.join(nodes)} is dead or silent, and what it left may still run",
        details=(*troubles, "nothing is started in its place, however long that takes, until it is gone"),
        hint=_orphan_hint(planner_nodes, link, nodes[0]),
        facts={"nodes": list(nodes)},
    )


def _declare_dead_hint(planner_nodes: PlannerNodes, outages: EngineOutages, node: str) -> str:
    """Return the hint. An operator's declaration counts once the cluster no longer contradicts it."""
    hint = f"if you know that it is off: `shoal nodes declare-dead {node}`"
    if outages.current is not None or not planner_nodes.is_alive(node):
        return hint
    return f"{hint}, once its cluster has noticed, too: `shoal nodes` calls it silent then"


def _orphan_hint(planner_nodes: PlannerNodes, link: EngineLink, node: str) -> str:
    """Return what helps if processes do not die. For a machine that is gone, only an operator can say so."""
    ways = [f"look on {node} for processes that do not die: `ps -eo pid,stat,args`; a restart ends them"]
    if isinstance(link.engine, SupportsClearing):
        ways.append(link.engine.how_to_clear(node))
    if link.outages.current is not None or not planner_nodes.is_alive(node):
        ways.append(f"if it is off for good: `shoal nodes declare-dead {node}`")
    return "; ".join(way for way in ways if way)


def _unreachable(
    running: RunningAttempts,
    planner_nodes: PlannerNodes,
    outages: EngineOutages,
    job: Job,
    attempt: Attempt,
    silent: tuple[str, ...],
) -> Explanation:
    fence_s = spec_of(job).fence + FENCE_MARGIN_S
    left_s = running.leases.fence_left_s(attempt, silent, spec_of(job).fence)
    silent_s = max(running.leases.task_silence_s(attempt, node) for node in silent)
    nodes = ", ".join(silent)
    troubles = "; ".join(_troubles(running, outages, attempt))
    rule = f"nothing is started in its place without evidence, or before {age(fence_s)} of silence"
    return Explanation(
        attempt_id=attempt.attempt_id,
        job_id=job.job_id,
        why=WaitReason.UNREACHABLE,
        sentence=f"no sign of life from {nodes} for {age(silent_s)}; unreachable is not dead",
        details=(f"it has not begun: {troubles}", rule) if troubles else (rule,),
        hint=_declare_dead_hint(planner_nodes, outages, silent[0]),
        facts={"silent_s": silent_s, "fence_s": fence_s, "fence_left_s": left_s, "nodes": list(silent)},
    )


MAX_LEARNED_AT_ONCE = 8
"""Waiting jobs that are predicted in one turn without a question, so that intervals are calibrated when a
question comes.
"""


async def predict_starts(
    clock: Clock, planning: Planning, engine: Engine, actor: Actor, attempt_ids: Collection[str]
) -> dict[str, Outlook]:
    """Predict the start of each attempt that waits, all from the same futures. `LimitReached`: too many
    questions at once.
    """
    async with planning.predictions.one_at_a_time(actor.id):
        return await _predict_starts(clock, planning, engine, attempt_ids)


async def predict_start_with_changes(
    clock: Clock, planning: Planning, engine: Engine, actor: Actor, attempt_id: str
) -> Outlook | None:
    """Return one job's outlook with the changes that would start it now; None if it does not wait.

    `LimitReached`: too many questions at once.
    """
    async with planning.predictions.one_at_a_time(actor.id):
        outlook = (await _predict_starts(clock, planning, engine, (attempt_id,))).get(attempt_id)
        if outlook is None:
            return None
        now, snapshot, policy = (
            clock.now(),
            planning.planner.snapshot(),
            planning.planner.policy,
        )
        spread, cluster = planning.stamps.spread, _own_queue(engine)
        start_it = f"have it handed to {cluster}" if cluster else START_IT
        suggestions = await anyio.to_thread.run_sync(
            lambda: suggest_changes(snapshot, policy, now, attempt_id, spread, start_it)
        )
    return msgspec.structs.replace(outlook, changes=suggestions.changes, not_looked=suggestions.not_looked)


async def _predict_starts(
    clock: Clock, planning: Planning, engine: Engine, attempt_ids: Collection[str]
) -> dict[str, Outlook]:
    now, snapshot, policy = (
        clock.now(),
        planning.planner.snapshot(),
        planning.planner.policy,
    )
    promises = planning.planner.promises

    def think() -> dict[str, StartSpan]:
        return predict(snapshot, policy, now, attempt_ids, planning.stamps.spread)

    spans = await anyio.to_thread.run_sync(think)
    by_attempt = outlooks(snapshot, now, attempt_ids, spans, promises, planning.predictions.calibration)
    for attempt_id, outlook in by_attempt.items():
        if outlook.basis is OutlookBasis.SCENARIOS:
            interval = Interval((outlook.earliest or now) - now, (outlook.latest or inf) - now)
            planning.predictions.remember(attempt_id, spans[attempt_id], interval, now)
    cluster = _own_queue(engine)
    return {
        attempt_id: with_cluster_queue(outlook, cluster) if cluster else outlook
        for attempt_id, outlook in by_attempt.items()
    }


def _own_queue(engine: Engine) -> str | None:
    """Return the name of a cluster that has its own queue; None if what Shoal places starts at once."""
    return engine.own_queue if isinstance(engine, SupportsOwnQueue) else None


async def learn_from_newest(clock: Clock, planning: Planning, engine: Engine) -> None:
    """Predict some of the newest waiting jobs that have no prediction, unless other questions are being
    answered: they take the time, and teach as much. Costs nothing while no job waits.
    """
    waiting = [
        candidate
        for candidate in planning.planner.waiting
        if candidate.attempt_id not in planning.predictions and not candidate.unmet
    ]
    newest = sorted(waiting, key=lambda candidate: (-candidate.submitted_at, candidate.attempt_id))[
        :MAX_LEARNED_AT_ONCE
    ]
    if newest and planning.predictions.is_idle:
        await predict_starts(clock, planning, engine, SHOAL, [candidate.attempt_id for candidate in newest])
