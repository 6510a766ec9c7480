"""`shoal explain-decision`: make a recorded decision of the scheduler again and say whether it comes out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from cyclopts import Parameter

from shoal.cli.flags import JsonFlag, connect, one_job
from shoal.cli.show import print_json
from shoal.cli.text import one_line, utc
from shoal.errors import Denied, NotFound

PAGE = 1000
Which = Annotated[
    str, Parameter(help="The number of a `plan.made` event, or a job: the decision that started it last.")
]
Why = Annotated[str | None, Parameter(name="--why", help="Also say why this job did not start in it.")]


def explain_decision(decision: Which, /, *, why: Why = None, json: JsonFlag = False) -> int:
    """Make a recorded decision again from the log alone, and compare. Exit code 1 when it differs.

    Needs the whole log: only those who may see every project can ask.
    """
    from shoal.sim.history.facts import facts_of
    from shoal.sim.history.replay import Replay

    with connect() as shoal:
        seq = int(decision) if decision.isdecimal() else _decision_of(shoal, decision)
        asked = one_job(shoal, why) if why else None
        events = list(whole_log(shoal, seq))
    replay = Replay()
    verdict = None
    for verdict in replay.verdicts(facts_of(events)):  # noqa: B007 - the last one is the one asked for
        pass
    if verdict is None or verdict.decision.seq != seq:
        raise NotFound(f"event {seq} is no decision of the scheduler", hint="shoal events --kind plan.made")
    told = _told(verdict, _names(events))
    if asked:
        told["why"] = _why(replay, events, asked, verdict.decision.at)
    if json:
        print_json(told)
    else:
        print("\n".join(_lines(told)))
    return 0 if told["reproduces"] else 1


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


def _decision_of(shoal: Any, job: str) -> int:
    """The newest decision that started the job."""
    job_id = one_job(shoal, job)
    placed = [event for event in shoal.events(job=job_id, limit=PAGE) if event["kind"] == "attempt.placed"]
    if not placed:
        raise NotFound(f"no decision has started `{one_line(job)}` yet", hint=f"`shoal why {one_line(job)}`")
    # Written in the same transaction, after all that it placed.
    after = int(placed[-1]["seq"])
    made = shoal.events(after=after, limit=1, kind="plan.made")
    if not made:
        raise NotFound("the decision that started this job is not in the log", hint="shoal audit --verify")
    return int(made[0]["seq"])


def _names(events: list[dict[str, Any]]) -> dict[str, str]:
    """What people call the job of each attempt."""
    return {
        event["attempt_id"]: one_line(event.get("ref") or event["job_id"])
        for event in events
        if event.get("attempt_id")
    }


def _told(verdict: Any, names: dict[str, str]) -> dict[str, Any]:
    decision = verdict.decision
    return {
        "decision": decision.seq,
        "at": decision.at,
        "seen": decision.seen,
        "reproduces": verdict.is_equal,
        "recorded": _starts(decision.starts, names),
        "made_again": _starts(verdict.starts, names),
        "stops": _stops(decision.evictions, names),
        "stops_made_again": _stops(verdict.evictions, names),
        "not_carried_out": [names.get(s.attempt_id, s.attempt_id) for s in decision.starts
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


def _stops(evictions: Any, names: dict[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "job": names.get(one.attempt_id, one.attempt_id),
            "for": names.get(one.for_attempt_id, one.for_attempt_id),
            "lost_device_s": one.lost_device_s,
        }
        for one in evictions
    ]


def _why(replay: Any, events: list[dict[str, Any]], job_id: str, at: float) -> str:
    newest = [
        event["attempt_id"] for event in events if event.get("job_id") == job_id and event["attempt_id"]
    ]
    said = replay.planner.explain(newest[-1], at) if newest else None
    return said.sentence if said else "it did not wait then"


def _lines(told: dict[str, Any]) -> list[str]:
    when = f"{utc(told['at'])} UTC"
    count = len(told["recorded"])
    found = [f"decision {told['decision']} of {when}: {count} {'job' if count == 1 else 'jobs'} to start"]
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


def _stop(stop: dict[str, Any]) -> str:
    return f"{stop['job']} stops for {stop['for']}"


def _start(start: dict[str, Any]) -> str:
    where = [
        f"{node} GPU {','.join(map(str, gpus))}" if gpus else node for node, gpus in start["nodes"].items()
    ]
    return f"{start['job']} on {', '.join(where)}"
