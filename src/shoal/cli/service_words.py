"""What an event of a service, its rollout, a replica or a token for it says, in words for people."""

from __future__ import annotations

from typing import Any

KINDS = ("service.", "rollout.", "replica.")
STAGES = {
    "canary": "tries",
    "rolling": "rolls over to",
    "done": "is now all of",
    "rolled_back": "is taken back from",
    "undone": "its rollout undone",
    "promoted": "its canary promoted",
}


def of_service(kind: str, data: dict[str, Any]) -> tuple[str, str]:
    """What happened, and why."""
    family, _, verb = kind.partition(".")
    because = str(data.get("because") or "")
    if family == "replica":
        return f"replica {verb}", because or str(data.get("address") or "")
    name = f"service {data.get('service')}"
    if family == "rollout":
        what = STAGES.get(verb, verb)
        return f"{name} {what}" if "to" not in data else f"{name} {what} release {data['to']}", because
    match verb:
        case "released":
            why = (data.get("model"), because)
            return f"{name} served, release {data.get('release')}", "; ".join(str(one) for one in why if one)
        case "scaled":
            return f"{name} scaled to {data.get('min')}..{data.get('max')}", ""
        case "resized":
            return f"{name} should have {data.get('replicas')} replicas", because
        case "stop_asked":
            return f"stop of {name} asked for", ""
    return f"{name} {verb.replace('_', ' ')}", because
