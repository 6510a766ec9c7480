"""What one event says, in words for people. `--json` has everything that is left out here."""

from __future__ import annotations

from typing import Any

from shoal.cli import service_words
from shoal.cli.text import duration, in_one_breath, one_line, utc

KINDS = {
    "job.stop_asked": "stop asked for",
    "array.stop_asked": "stop of the array asked for",
    "job.retried": "to be tried again",
    "node.added": "joined",
    "node.answers": "answers again",
    "node.busy": "has work of others",
    "node.idle": "has no work of others any more",
    "node.gone": "gone: the cluster lists it no more",
    "node.back": "listed again",
    "node.removed": "taken off the list",
}
"""Kinds whose own words would say less."""
SHOWN_ROUTES = 5
DEVICES = ("quota", "limit", "borrow")


def told(event: dict[str, Any]) -> str:
    """What happened, by whom if not by Shoal itself, and why."""
    kind, data = str(event["kind"]), event.get("data") or {}
    what, why = _of_attempt(kind, data) if kind.startswith("attempt.") else _of_others(kind, data)
    actor = str(event.get("actor") or "shoal")
    by = "" if actor == "shoal" else f" by {actor.partition(':')[2] or actor}"
    return one_line(what + by) + (f": {in_one_breath(why)}" if why else "")


def subject(event: dict[str, Any]) -> str:
    """The job, else the node, else the project it is about."""
    ref = event.get("ref") or event.get("job_id") or event.get("node") or event.get("project")
    return one_line(ref or "-")


def _of_attempt(kind: str, data: dict[str, Any]) -> tuple[str, str]:
    inner = data.get("event") or {}
    match inner.get("type"):
        case "Placed":
            return f"placed on {', '.join(share['node'] for share in inner['allocation'])}", ""
        case "Accepted":
            return "handed to its node", ""
        case "Started":
            return f"running on {inner['node']}", ""
        case "NodeEnded":
            outcome = inner["outcome"]
            how = str(outcome["kind"]).replace("_", " ")
            nth = f"attempt {outcome['epoch']} " if outcome["epoch"] > 1 else ""
            return f"{nth}ended on {outcome['node']}", outcome["message"] or how
        case "Regrouped" if kind == "attempt.explained":
            return f"group {inner['generation']} failed first on {inner['failure']['node']}", inner[
                "failure"
            ]["message"]
        case "Regrouped":
            return _regrouped(inner), inner["failure"]["message"]
        case "Recovered":
            told = inner["recovery"]
            seconds, lost = told.get("stepped_s"), told.get("steps_lost")
            also = "" if lost is None else f", {lost} lost"
            how = f"first step after {seconds:.2f} s{also}" if seconds is not None else "ranks started"
            return f"recovered on {told['node']}, group {told['generation']}", how
        case "StopAsked":
            verb = "attempt ended" if data.get("to") == "ended" else "stopping"
            return verb, inner.get("because") or str(inner["reason"]).replace("_", " ")
        case "Refused":
            return "refused by the engine", inner["message"]
        case "FencePassed":
            return "attempt given up", "silent past its fence"
    return kind.replace(".", " "), ""


def _regrouped(inner: dict[str, Any]) -> str:
    share, number = inner.get("share"), inner["generation"] + 1
    if share is None:
        return f"all ranks start anew, group {number}"
    lost = inner["failure"]["node"]
    where = lost if share["node"] == lost else f"{share['node']} instead of {lost}"
    return f"its share begins anew on {where}, group {number}"


def _of_others(kind: str, data: dict[str, Any]) -> tuple[str, str]:
    if kind == "job.ended":
        return str(data.get("outcome")), str(data.get("because") or "")
    if kind == "control.leads":
        return f"term {data.get('term')}: {data.get('url')} leads", ""
    if kind == "job.submitted":
        return f"submitted as {data.get('name')}", ""
    if kind == "node.suspected":
        return "its log speaks of a fault of its node, which it avoids from now on", str(
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
        return f"gives way to {data.get('for') or 'a job of another project'}", ""
    if kind == "job.grows":
        return f"goes on with {data.get('num_nodes')} nodes instead of {data.get('has_nodes')}", ""
    if kind == "job.preempted_for":
        return f"has others stop for it: {data.get('num_jobs')}", ""
    if kind.startswith("drill."):
        result = data.get("result") or {}
        because = result.get("because") or ""
        return f"drill {data.get('kind')} {result.get('outcome') or 'begun'}", str(because)
    if kind.startswith("window."):
        verb = "cancelled" if kind == "window.cancelled" else "declared"
        what = f"{data.get('kind')} of {', '.join(data.get('nodes') or ())}"
        return f"{what} {verb}", str(data.get("because") or "")
    if kind.startswith(service_words.KINDS):
        return service_words.of_service(kind, data)
    if kind == "access.denied":
        return "denied", _refused(data) if "count" in data else f"{data.get('method')} {data.get('path')}"
    words = KINDS.get(kind, kind.replace(".", " "))
    if kind.startswith("node."):
        return words.removeprefix("node "), str(data.get("because") or data.get("closed") or "")
    details = (f"{key} {_told(key, value)}" for key, value in data.items() if key != "project")
    return words, ", ".join(detail for detail in details if not detail.endswith(" "))


def _refused(data: dict[str, Any]) -> str:
    """Of many that are told together: how many, until when, for what."""
    routes = sorted((data.get("routes") or {}).items(), key=lambda item: (-int(item[1]), item[0]))
    which = ", ".join(f"{count} x {route}" for route, count in routes[:SHOWN_ROUTES])
    also = f", and {len(routes) - SHOWN_ROUTES} more routes" if len(routes) > SHOWN_ROUTES else ""
    elsewhere = data.get("elsewhere")
    of_others = f"; {elsewhere} for things of projects that the caller may not see" if elsewhere else ""
    return f"{data.get('what')} until {utc(data.get('until') or 0.0)} UTC{of_others}: {which}{also}"


def _told(key: str, value: object) -> str:
    """Empty for what is not there, or too long to tell."""
    if key in DEVICES:
        named = value if isinstance(value, dict) else {}
        return " ".join(f"{unit}={count}" for unit, count in named.items() if count is not None) or "none"
    return "" if value is None or isinstance(value, dict | list) else str(value)
