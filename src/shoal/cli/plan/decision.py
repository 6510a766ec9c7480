"""`shoal explain-decision`: replay a recorded decision of the scheduler and compare the result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from cyclopts import Parameter

from shoal.cli.flags import JsonFlag, connect, resolve_job
from shoal.cli.output import print_json
from shoal.cli.text import one_line, utc
from shoal.errors import Denied, NotFound

PAGE = 1000
Which = Annotated[
    str, Parameter(help="The number of a `plan.made` event, or a job: all decisions about it, in order.")
]
Why = Annotated[
    str | None, Parameter(name="--why", help="Also say why the last decision did not start this job.")
]


def explain_decision(decision: Which, /, *, why: Why = None, json: JsonFlag = False) -> int:
    """Replay recorded decisions from the log alone, and compare. Exit code 1 if one differs.

    For a job, these are the decisions that started it, looked for another node
    for a lost task of it, stopped others for it, or stopped it for others. They
    need the whole log, so the command is for users who may see every project.
    """
    from shoal.sim.history.facts import facts_of
    from shoal.sim.history.replay import DecisionReplay

    number = int(decision) if decision.isdecimal() else None
    with connect() as shoal:
        job_id = resolve_job(shoal, decision) if number is None else None
        explained_id = resolve_job(shoal, why) if why else None
        events = list(read_whole_log(shoal, number))
    about = _attempt_ids(events, job_id) if job_id else None
    wanted = _decisions_about(facts_of(events), about) if about is not None else {number or 0}
    if not wanted:
        raise NotFound(f"no decision has started `{one_line(decision)}` yet", hint=f"`shoal why {decision}`")
    events = [event for event in events if event["seq"] <= max(wanted)]
    replay, names = DecisionReplay(), _job_names(events)
    verdicts = replay.verdicts(facts_of(events))
    held = _held_devices(facts_of(events))
    views = [
        _decision_view(verdict, names, held, about) for verdict in verdicts if verdict.decision.seq in wanted
    ]
    if len(views) != len(wanted):
        missing = next(seq for seq in wanted if all(seq != view["decision"] for view in views))
        raise NotFound(
            f"event {missing} is not a decision of the scheduler that can be replayed",
            hint="shoal events --kind plan.made",
        )
    if explained_id:
        views[-1]["why"] = _why(replay, events, explained_id, views[-1]["at"])
    if json:
        print_json(views[0] if about is None else {"job_id": job_id, "decisions": views})
    else:
        print("\n".join(line for view in views for line in _decision_lines(view)))
    return 0 if all(view["reproduces"] for view in views) else 1


def read_whole_log(shoal: Any, until: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield every event from the first on, at most up to `until`."""
    after = 0
    while until is None or after < until:
        limit = PAGE if until is None else min(PAGE, until - after)
        page = shoal.events(after=after, limit=limit)
        for event in page:
            if event["seq"] != after + 1:
                raise Denied(
                    "this needs the whole event log, and you may see only a part of it",
                    hint="ask a user with a role for all projects: `shoal user` lists them",
                )
            after = event["seq"]
            yield event
        if len(page) < limit:
            return


def _attempt_ids(events: list[dict[str, Any]], job_id: str) -> set[str]:
    return {event["attempt_id"] for event in events if event["job_id"] == job_id and event["attempt_id"]}


def _decisions_about(facts: Iterable[tuple[int, Any]], attempts: set[str]) -> set[int]:
    """Return the decisions that start one of the attempts, replace a task of one, stop one, or stop another
    job for one.
    """
    from shoal.sim.history.facts import RecordedDecision

    decisions = (fact for _, fact in facts if isinstance(fact, RecordedDecision))
    return {
        decision.seq
        for decision in decisions
        if not attempts.isdisjoint(start.attempt_id for start in decision.starts)
        or not attempts.isdisjoint(planned.attempt_id for planned in decision.replacements)
        or any(not attempts.isdisjoint((stop.attempt_id, stop.for_attempt_id)) for stop in decision.evictions)
    }


def _held_devices(facts: Iterable[tuple[int, Any]]) -> dict[str, tuple[str, float]]:
    """Return the devices each attempt got when it started: `GPU` and how many; without GPUs its CPUs."""
    from shoal.sim.history.facts import RecordedDecision

    devices: dict[str, tuple[str, float]] = {}
    for _, fact in facts:
        if isinstance(fact, RecordedDecision):
            for start in fact.starts:
                num_gpus = sum(share.num_gpus for share in start.allocation)
                num_cpus = sum(share.cpus for share in start.allocation)
                devices[start.attempt_id] = ("GPU", num_gpus) if num_gpus else ("CPU", num_cpus)
    return devices


def _job_names(events: list[dict[str, Any]]) -> dict[str, str]:
    """Return the ref of each attempt's job."""
    return {
        event["attempt_id"]: one_line(event.get("ref") or event["job_id"])
        for event in events
        if event.get("attempt_id")
    }


def _decision_view(
    verdict: Any, names: dict[str, str], held: dict[str, tuple[str, float]], about: set[str] | None
) -> dict[str, Any]:
    """Return the facts of a decision; with `about`, only those that concern these attempts."""
    decision = verdict.decision
    replacements = [entry for entry in decision.replacements if about is None or entry.attempt_id in about]
    starts = [entry for entry in decision.starts if about is None or entry.attempt_id in about]
    stops = [
        entry
        for entry in decision.evictions
        if about is None or entry.attempt_id in about or entry.for_attempt_id in about
    ]
    moved = [entry for entry in replacements if entry.task is not None]
    num_others = len(decision.starts) + len(decision.replacements) + len(decision.evictions)
    num_others -= len(starts) + len(replacements) + len(stops)
    return {
        "decision": decision.seq,
        "at": decision.at,
        "seen": decision.seen,
        "reproduces": verdict.is_equal,
        "recorded": _starts(starts, names),
        "made_again": _starts(verdict.starts, names),
        "replacements": _replacements(replacements, names),
        "replacements_made_again": _replacements(verdict.replacements, names),
        "stops": _stops(stops, names, held),
        "num_others": num_others,
        "stops_made_again": _stops(verdict.evictions, names, held),
        "not_carried_out": [names.get(entry.attempt_id, entry.attempt_id) for entry in (*starts, *moved)
                            if entry.attempt_id not in decision.placed],
    }  # fmt: skip


def _starts(starts: Any, names: dict[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "job": names.get(start.attempt_id, start.attempt_id),
            "nodes": {share.node: list(share.gpu_ids) for share in start.allocation},
        }
        for start in starts
    ]


def _replacements(replacements: Any, names: dict[str, str]) -> list[dict[str, Any]]:
    """`nodes`: the node that takes over the lost task, with its GPUs; empty if no node could."""
    return [
        {
            "job": names.get(planned.attempt_id, planned.attempt_id),
            "lost_node": planned.lost_node,
            "nodes": {} if planned.task is None else {planned.task.node: list(planned.task.gpu_ids)},
        }
        for planned in replacements
    ]


def _stops(evictions: Any, names: dict[str, str], held: dict[str, tuple[str, float]]) -> list[dict[str, Any]]:
    return [
        {
            "job": names.get(eviction.attempt_id, eviction.attempt_id),
            "for": names.get(eviction.for_attempt_id, eviction.for_attempt_id),
            "lost_device_s": eviction.lost_device_s,
            "likely_device_s": eviction.likely_device_s,
            "lost": _loss_text(eviction, held),
        }
        for eviction in evictions
    ]


def _loss_text(eviction: Any, held: dict[str, tuple[str, float]]) -> str:
    """Return `3.2 GPU-hours`, as `shoal why` prints it; in devices, if the log lacks the attempt's start."""
    device, count = held.get(eviction.attempt_id, ("device", 0.0))
    lost_s = eviction.lost_s * count if count else eviction.lost_device_s
    return f"{lost_s / 3600:.2g} {device}-hours"


def _why(replay: Any, events: list[dict[str, Any]], job_id: str, at: float) -> str:
    newest = [
        event["attempt_id"] for event in events if event.get("job_id") == job_id and event["attempt_id"]
    ]
    explanation = replay.planner.explain(newest[-1], at) if newest else None
    return explanation.sentence if explanation else "it was not waiting then"


def _decision_lines(view: dict[str, Any]) -> list[str]:
    when = f"{utc(view['at'])} UTC"
    lines = [f"decision {view['decision']} of {when}: {_counts_text(view)}"]
    lines += [f"  {_replacement_line(planned)}" for planned in view["replacements"]]
    lines += [f"  {_start_line(start)}" for start in view["recorded"]]
    lines += [f"  {_stop_line(stop)}" for stop in view["stops"]]
    for job in view["not_carried_out"]:
        lines.append(f"  not carried out: {job} (the job or a node had changed meanwhile)")
    if view["reproduces"]:
        lines.append(f"reproduces: the log up to event {view['seen']} leads to the same decision")
    else:
        lines.append(f"differs: the log up to event {view['seen']} now leads to")
        again = [_replacement_line(planned) for planned in view["replacements_made_again"]]
        again += [_start_line(start) for start in view["made_again"]]
        again += [_stop_line(stop) for stop in view["stops_made_again"]]
        lines += [f"  {line}" for line in again or ["nothing"]]
    return [*lines, f"why not: {view['why']}"] if "why" in view else lines


def _counts_text(view: dict[str, Any]) -> str:
    starts, stops, others = len(view["recorded"]), len(view["stops"]), view["num_others"]
    jobs = "job" if starts == 1 else "jobs"
    lost = len(view["replacements"])
    counts = [f"{lost} lost task{'s' * (lost > 1)}"] if lost else []
    counts += [f"{starts} {jobs} to start"] if starts or not (stops or lost) else []
    counts += [f"{stops} to stop"] if stops else []
    return ", ".join(counts) + (f" (and {others} other{'s' * (others > 1)})" if others else "")


def _stop_line(stop: dict[str, Any]) -> str:
    return f"{stop['job']} stops for {stop['for']}, at a loss of at most {stop['lost']}"


def _replacement_line(planned: dict[str, Any]) -> str:
    where = f"continues on {_nodes_text(planned['nodes'])}" if planned["nodes"] else "fits on no other node"
    return f"{planned['job']}: its lost task on {planned['lost_node']} {where}"


def _start_line(start: dict[str, Any]) -> str:
    return f"{start['job']} on {_nodes_text(start['nodes'])}"


def _nodes_text(nodes: dict[str, list[int]]) -> str:
    return ", ".join(
        f"{node} GPU {','.join(map(str, gpus))}" if gpus else node for node, gpus in nodes.items()
    )
