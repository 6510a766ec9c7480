"""`shoal explain-decision`: make a recorded decision of the scheduler again and say whether it comes out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from cyclopts import Parameter

from shoal.cli.flags import JsonFlag, connect, one_job
from shoal.cli.show import print_json
from shoal.cli.text import one_line, utc
from shoal.errors import Denied, NotFound

PAGE = 1000
Which = Annotated[
    str, Parameter(help="The number of a `plan.made` event, or a job: all decisions about it, in order.")
]
Why = Annotated[str | None, Parameter(name="--why", help="Also say why this job did not start in the last.")]


def explain_decision(decision: Which, /, *, why: Why = None, json: JsonFlag = False) -> int:
    """Make recorded decisions again from the log alone, and compare. Exit code 1 when one differs.

    Of a job: those that started it, stopped others for it, or stopped it for others.
    Needs the whole log: only those who may see every project can ask.
    """
    from shoal.sim.history.facts import facts_of
    from shoal.sim.history.replay import Replay

    number = int(decision) if decision.isdecimal() else None
    with connect() as shoal:
        job_id = one_job(shoal, decision) if number is None else None
        asked = one_job(shoal, why) if why else None
        events = list(whole_log(shoal, number))
    about = _attempts(events, job_id) if job_id else None
    wanted = _decisions_about(facts_of(events), about) if about is not None else {number or 0}
    if not wanted:
        raise NotFound(f"no decision has started `{one_line(decision)}` yet", hint=f"`shoal why {decision}`")
    events = [event for event in events if event["seq"] <= max(wanted)]
    replay, names = Replay(), _names(events)
    verdicts = replay.verdicts(facts_of(events))
    held = _held(facts_of(events))
    found = [_told(verdict, names, held, about) for verdict in verdicts if verdict.decision.seq in wanted]
    if len(found) != len(wanted):
        missing = next(seq for seq in wanted if all(seq != told["decision"] for told in found))
        raise NotFound(
            f"event {missing} is no decision of the scheduler that can be made again",
            hint="shoal events --kind plan.made",
        )
    if asked:
        found[-1]["why"] = _why(replay, events, asked, found[-1]["at"])
    if json:
        print_json(found[0] if about is None else {"job_id": job_id, "decisions": found})
    else:
        print("\n".join(line for told in found for line in _lines(told)))
    return 0 if all(told["reproduces"] for told in found) else 1


def whole_log(shoal: Any, until: int | None = None) -> Iterator[dict[str, Any]]:
    """Every event from the first on."""
    after = 0
    while until is None or after < until:
        limit = PAGE if until is None else min(PAGE, until - after)
        page = shoal.events(after=after, limit=limit)
        for event in page:
            if event["seq"] != after + 1:
                raise Denied(
                    "this needs the whole event log, and you may see only a part of it",
                    hint="ask somebody with a role for all projects: `shoal user`",
                )
            after = event["seq"]
            yield event
        if len(page) < limit:
            return


def _attempts(events: list[dict[str, Any]], job_id: str) -> set[str]:
    return {event["attempt_id"] for event in events if event["job_id"] == job_id and event["attempt_id"]}


def _decisions_about(facts: Iterable[tuple[int, Any]], attempts: set[str]) -> set[int]:
    """Those that start one of them, stop one, or stop somebody for one."""
    from shoal.sim.history.facts import Decision

    decisions = (fact for _, fact in facts if isinstance(fact, Decision))
    return {
        one.seq
        for one in decisions
        if not attempts.isdisjoint(start.attempt_id for start in one.starts)
        or any(not attempts.isdisjoint((stop.attempt_id, stop.for_attempt_id)) for stop in one.evictions)
    }


def _held(facts: Iterable[tuple[int, Any]]) -> dict[str, tuple[str, float]]:
    """What each attempt was given when it started: `GPU` and how many, or of one without GPUs its CPUs."""
    from shoal.sim.history.facts import Decision

    found: dict[str, tuple[str, float]] = {}
    for _, fact in facts:
        if isinstance(fact, Decision) and fact.replaces is None:
            for start in fact.starts:
                num_gpus = sum(share.num_gpus for share in start.allocation)
                num_cpus = sum(share.cpus for share in start.allocation)
                found[start.attempt_id] = ("GPU", num_gpus) if num_gpus else ("CPU", num_cpus)
    return found


def _names(events: list[dict[str, Any]]) -> dict[str, str]:
    """What people call the job of each attempt."""
    return {
        event["attempt_id"]: one_line(event.get("ref") or event["job_id"])
        for event in events
        if event.get("attempt_id")
    }


def _told(
    verdict: Any, names: dict[str, str], held: dict[str, tuple[str, float]], about: set[str] | None
) -> dict[str, Any]:
    """What there is to say of a decision; only what concerns some attempts, if it is about those."""
    decision = verdict.decision
    starts = [one for one in decision.starts if about is None or one.attempt_id in about]
    stops = [
        one
        for one in decision.evictions
        if about is None or one.attempt_id in about or one.for_attempt_id in about
    ]
    return {
        "decision": decision.seq,
        "at": decision.at,
        "seen": decision.seen,
        "reproduces": verdict.is_equal,
        "recorded": _starts(starts, names),
        "made_again": _starts(verdict.starts, names),
        "stops": _stops(stops, names, held),
        "num_others": len(decision.starts) - len(starts) + len(decision.evictions) - len(stops),
        "stops_made_again": _stops(verdict.evictions, names, held),
        "not_carried_out": [names.get(s.attempt_id, s.attempt_id) for s in starts
                            if s.attempt_id not in decision.placed],
    }  # fmt: skip


def _starts(starts: Any, names: dict[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "job": names.get(start.attempt_id, start.attempt_id),
            "nodes": {share.node: list(share.gpu_ids) for share in start.allocation},
        }
        for start in starts
    ]


def _stops(evictions: Any, names: dict[str, str], held: dict[str, tuple[str, float]]) -> list[dict[str, Any]]:
    return [
        {
            "job": names.get(one.attempt_id, one.attempt_id),
            "for": names.get(one.for_attempt_id, one.for_attempt_id),
            "lost_device_s": one.lost_device_s,
            "likely_device_s": one.likely_device_s,
            "lost": _lost(one, held),
        }
        for one in evictions
    ]


def _lost(eviction: Any, held: dict[str, tuple[str, float]]) -> str:
    """`3.2 GPU-hours`, as `shoal why` tells it; of an attempt whose start is not in the log, in devices."""
    device, count = held.get(eviction.attempt_id, ("device", 0.0))
    lost_s = eviction.lost_s * count if count else eviction.lost_device_s
    return f"{lost_s / 3600:.2g} {device}-hours"


def _why(replay: Any, events: list[dict[str, Any]], job_id: str, at: float) -> str:
    newest = [
        event["attempt_id"] for event in events if event.get("job_id") == job_id and event["attempt_id"]
    ]
    said = replay.planner.explain(newest[-1], at) if newest else None
    return said.sentence if said else "it did not wait then"


def _lines(told: dict[str, Any]) -> list[str]:
    when = f"{utc(told['at'])} UTC"
    found = [f"decision {told['decision']} of {when}: {_counted(told)}"]
    found += [f"  {_start(start)}" for start in told["recorded"]]
    found += [f"  {_stop(stop)}" for stop in told["stops"]]
    for job in told["not_carried_out"]:
        found.append(f"  not carried out: {job} (it, or a node, had changed meanwhile)")
    if told["reproduces"]:
        found.append(f"reproduces: from the log up to event {told['seen']} the same follows again")
    else:
        found.append(f"differs: from the log up to event {told['seen']} now follows")
        again = [_start(start) for start in told["made_again"]]
        again += [_stop(stop) for stop in told["stops_made_again"]]
        found += [f"  {line}" for line in again or ["nothing"]]
    return [*found, f"why not: {told['why']}"] if "why" in told else found


def _counted(told: dict[str, Any]) -> str:
    starts, stops, others = len(told["recorded"]), len(told["stops"]), told["num_others"]
    jobs = "job" if starts == 1 else "jobs"
    counts = [f"{starts} {jobs} to start"] if starts or not stops else []
    counts += [f"{stops} to stop"] if stops else []
    return ", ".join(counts) + (f" (and {others} other{'s' * (others > 1)})" if others else "")


def _stop(stop: dict[str, Any]) -> str:
    return f"{stop['job']} stops for {stop['for']}, at a loss of at most {stop['lost']}"


def _start(start: dict[str, Any]) -> str:
    where = [
        f"{node} GPU {','.join(map(str, gpus))}" if gpus else node for node, gpus in start["nodes"].items()
    ]
    return f"{start['job']} on {', '.join(where)}"
