"""`shoal status`: the cluster on one screen."""

from __future__ import annotations

import time
from typing import Any

from shoal.cli.flags import JsonFlag, connect
from shoal.cli.show import print_json
from shoal.cli.text import duration, number, one_line, told_failing, told_taken, told_unanswered
from shoal.client.credentials import Endpoint


def status(*, json: JsonFlag = False) -> int:
    """Show whether the cluster is well: server, nodes, devices and jobs."""
    with connect() as shoal:
        told = shoal.status()
        there = shoal.transport.endpoint
    if json:
        print_json({"url": there.url, **told})
    else:
        print("\n".join(lines(there, told, time.time())))
    return 0


def lines(there: Endpoint, told: dict[str, Any], now: float) -> list[str]:
    nodes, devices = told.get("nodes") or {}, told.get("devices") or {}
    version = f"Shoal {one_line(told.get('version') or '?')}"
    store, engine = one_line(told.get("store") or "?"), one_line(told.get("engine") or "?")
    others = [
        f"{count} {state}" for state, count in nodes.items() if state not in ("total", "ready") and count
    ]
    counts = [f"{count} {name}" for name, count in (told.get("counts") or {}).items() if count]
    found = [
        f"server   {one_line(there.url)}  {version}, up {duration(now - told['started_at'])}",
        *([] if there.is_local else [f"         chosen by {there.chosen_by}"]),
        f"store    {store}; engine {engine}",
        f"nodes    {nodes.get('ready', 0)} of {nodes.get('total', 0)} ready"
        + "".join(f", {o}" for o in others),
        f"GPUs     {number(devices.get('gpus_used'))} of {number(devices.get('gpus_total'))} in use",
        f"CPUs     {number(devices.get('cpus_used'))} of {number(devices.get('cpus_total'))} in use",
        f"jobs     {', '.join(counts) or 'none open'}",
    ]
    found += [f"failing  {told_failing(one)}" for one in told.get("failing") or ()]
    if port := told.get("taken_service_port"):
        found.append(f"services {told_taken(port)}")
    if away := told.get("unanswered"):
        why = f" ({one_line(away['why'])})" if away.get("why") else ""
        found.append(f"cluster  {told_unanswered(told['engine'], away)}{why}")
    head = told.get("events_head")
    if isinstance(head, dict):
        found.append(f"events   {head.get('seq')}, head {one_line(head.get('hash') or '')[:16]}")
    return found
