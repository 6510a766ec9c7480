"""Say in words what one event records. `--json` prints everything that is left out here.

`describe_event` is the entry. Events of an attempt, of a service with its rollouts and replicas, and all
others have a function each.
"""

from __future__ import annotations

from typing import Any

from shoal.cli.text import duration, joined_lines, one_line, utc

KINDS = {
    "job.stop_asked": "stop requested",
    "array.stop_asked": "stop of the array requested",
    "job.retried": "will be retried",
    "node.added": "joined",
    "node.answers": "answers again",
    "node.busy": "has work of others",
    "node.idle": "no longer has work of others",
    "node.gone": "gone: the cluster no longer lists it",
    "node.back": "listed again",
    "node.removed": "removed from the list",
}
"""Kinds whose own name would say less."""
SHOWN_ROUTES = 5
DEVICES = ("quota", "limit", "borrow")


def describe_event(event: dict[str, Any]) -> str:
    """Say what happened, who did it unless it was Shoal itself, and why."""
    kind, data = str(event["kind"]), event.get("data") or {}
    action, why = (
        _attempt_event_text(kind, data) if kind.startswith("attempt.") else _other_event_text(kind, data)
    )
    actor = str(event.get("actor") or "shoal")
    by = "" if actor == "shoal" else f" by {actor.partition(':')[2] or actor}"
    return one_line(action + by) + (f": {joined_lines(why)}" if why else "")


def subject(event: dict[str, Any]) -> str:
    """Return the job, else the node, else the project that the event is about."""
    ref = event.get("ref") or event.get("job_id") or event.get("node") or event.get("project")
    return one_line(ref or "-")


def _attempt_event_text(kind: str, data: dict[str, Any]) -> tuple[str, str]:
    inner = data.get("event") or {}
    match inner.get("type"):
        case "AttemptPlaced":
            return f"placed on {', '.join(task['node'] for task in inner['allocation'])}", ""
        case "SubmissionAccepted":
            return "handed to its node", ""
        case "TaskStarted":
            return f"running on {inner['node']}", ""
        case "TaskEnded":
            outcome = inner["outcome"]
            how = str(outcome["kind"]).replace("_", " ")
            nth = f"attempt {outcome['epoch']} " if outcome["epoch"] > 1 else ""
            return f"{nth}ended on {outcome['node']}", outcome["message"] or how
        case "RanksRestarted" if kind == "attempt.explained":
            return f"group {inner['rendezvous_round']} failed first on {inner['failure']['node']}", inner[
                "failure"
            ]["message"]
        case "RanksRestarted":
            return _regrouping_text(inner), inner["failure"]["message"]
        case "TaskRecovered":
            recovery = inner["recovery"]
            seconds, lost = recovery.get("stepped_s"), recovery.get("steps_lost")
            also = "" if lost is None else f", {lost} lost"
            how = f"first step after {seconds:.2f} s{also}" if seconds is not None else "ranks started"
            return f"recovered on {recovery['node']}, group {recovery['rendezvous_round']}", how
        case "StopRequested":
            verb = "attempt ended" if data.get("to") == "ended" else "stopping"
            return verb, inner.get("because") or str(inner["reason"]).replace("_", " ")
        case "SubmissionRefused":
            return "refused by the engine", inner["message"]
        case "FenceExpired":
            return "attempt given up", "silent past its fence"
    return kind.replace(".", " "), ""


def _regrouping_text(inner: dict[str, Any]) -> str:
    share, number = inner.get("task"), inner["rendezvous_round"] + 1
    if share is None:
        return f"all ranks restart, group {number}"
    lost = inner["failure"]["node"]
    where = lost if share["node"] == lost else f"{share['node']} instead of {lost}"
    return f"its task restarts on {where}, group {number}"


def _other_event_text(kind: str, data: dict[str, Any]) -> tuple[str, str]:
    if kind == "job.ended":
        return str(data.get("outcome")), str(data.get("because") or "")
    if kind == "control.leads":
        return f"term {data.get('term')}: {data.get('url')} leads", ""
    if kind == "job.submitted":
        return f"submitted as {data.get('name')}", ""
    if kind == "node.suspected":
        return "its log reports a fault of its node, which it avoids from now on", str(
            data.get("because") or ""
        )
    if kind == "job.retrying":
        reason, pause = str(data.get("reason")).replace("_", " "), duration(data.get("backoff_s"))
        return f"queued again after {reason}, attempt {data.get('epoch')} in {pause}", ""
    if kind == "plan.made":
        placed = data.get("num_placed", len(data.get("placed") or ()))
        evicted = data.get("num_evicted", len(data.get("evicted") or ()))
        also = f", {evicted} evicted" if evicted else ""
        return f"plan made: {placed} placed{also}, {data.get('waiting')} waiting", ""
    if kind == "plan.part":
        return "plan, a part of the next event", ""
    if kind == "job.evicted":
        return f"makes room for {data.get('for') or 'a job of another project'}", ""
    if kind == "job.grows":
        return f"continues with {data.get('num_nodes')} nodes instead of {data.get('has_nodes')}", ""
    if kind == "job.preempted_for":
        return f"has others stop for it: {data.get('num_jobs')}", ""
    if kind.startswith("drill."):
        result = data.get("result") or {}
        because = result.get("because") or ""
        return f"drill {data.get('kind')} {result.get('outcome') or 'begun'}", str(because)
    if kind.startswith("window."):
        verb = "cancelled" if kind == "window.cancelled" else "declared"
        window = f"{data.get('kind')} of {', '.join(data.get('nodes') or ())}"
        return f"{window} {verb}", str(data.get("because") or "")
    if kind.startswith(SERVICE_KINDS):
        return service_event_text(kind, data)
    if kind == "access.denied":
        return "denied", _refusals_text(
            data
        ) if "count" in data else f"{data.get('method')} {data.get('path')}"
    text = KINDS.get(kind, kind.replace(".", " "))
    if kind.startswith("node."):
        return text.removeprefix("node "), str(data.get("because") or data.get("closed") or "")
    details = (f"{key} {_detail_text(key, value)}" for key, value in data.items() if key != "project")
    return text, ", ".join(detail for detail in details if not detail.endswith(" "))


def _refusals_text(data: dict[str, Any]) -> str:
    """Summarize refusals that are recorded together: how many, until when, for which routes."""
    routes = sorted((data.get("routes") or {}).items(), key=lambda item: (-int(item[1]), item[0]))
    which = ", ".join(f"{count} x {route}" for route, count in routes[:SHOWN_ROUTES])
    also = f", and {len(routes) - SHOWN_ROUTES} more routes" if len(routes) > SHOWN_ROUTES else ""
    elsewhere = data.get("elsewhere")
    of_others = f"; {elsewhere} for resources of projects that the caller may not see" if elsewhere else ""
    return f"{data.get('what')} until {utc(data.get('until') or 0.0)} UTC{of_others}: {which}{also}"


def _detail_text(key: str, value: object) -> str:
    """Return the value as text; "" if it is missing or too long to print."""
    if key in DEVICES:
        named = value if isinstance(value, dict) else {}
        return " ".join(f"{unit}={count}" for unit, count in named.items() if count is not None) or "none"
    return "" if value is None or isinstance(value, dict | list) else str(value)


SERVICE_KINDS = ("service.", "rollout.", "replica.")
STAGES = {
    "canary": "tries",
    "rolling": "rolls over to",
    "done": "is now all of",
    "rolled_back": "is rolled back from",
    "undone": "its rollout undone",
    "promoted": "its canary promoted",
}


def service_event_text(kind: str, data: dict[str, Any]) -> tuple[str, str]:
    """Return what happened and why."""
    family, _, verb = kind.partition(".")
    because = str(data.get("because") or "")
    if family == "replica":
        return f"replica {verb}", because or str(data.get("address") or "")
    name = f"service {data.get('service')}"
    if family == "rollout":
        action = STAGES.get(verb, verb)
        return f"{name} {action}" if "to" not in data else f"{name} {action} release {data['to']}", because
    match verb:
        case "released":
            why = (data.get("model"), because)
            return f"{name} served, release {data.get('release')}", "; ".join(
                str(part) for part in why if part
            )
        case "scaled":
            return f"{name} scaled to {data.get('min')}..{data.get('max')}", ""
        case "resized":
            return f"{name} should have {data.get('replicas')} replicas", because
        case "stop_asked":
            return f"stop of {name} requested", ""
    return f"{name} {verb.replace('_', ' ')}", because
