"""`shoal status`: the cluster on one screen."""

from __future__ import annotations

import time
from typing import Any

from shoal.cli.flags import JsonFlag, connect
from shoal.cli.output import print_json
from shoal.cli.text import (
    duration,
    failing_loop_text,
    number,
    one_line,
    taken_port_text,
    unanswered_engine_text,
)
from shoal.client.credentials import Endpoint


def status(*, json: JsonFlag = False) -> int:
    """Show the server, nodes, devices and jobs on one screen."""
    with connect() as shoal:
        view = shoal.status()
        there = shoal.transport.endpoint
    if json:
        print_json({"url": there.url, **view})
    else:
        print("\n".join(status_lines(there, view, time.time())))
    return 0


def status_lines(there: Endpoint, view: dict[str, Any], now: float) -> list[str]:
    nodes, devices = view.get("nodes") or {}, view.get("devices") or {}
    version = f"Shoal {one_line(view.get('version') or '?')}"
    store, engine = one_line(view.get("store") or "?"), one_line(view.get("engine") or "?")
    others = [
        f"{count} {state}" for state, count in nodes.items() if state not in ("total", "ready") and count
    ]
    counts = [f"{count} {name}" for name, count in (view.get("counts") or {}).items() if count]
    lines = [
        f"server   {one_line(there.url)}  {version}, up {duration(now - view['started_at'])}",
        *([] if there.is_local else [f"         chosen by {there.chosen_by}"]),
        f"store    {store}; engine {engine}",
        f"nodes    {nodes.get('ready', 0)} of {nodes.get('total', 0)} ready"
        + "".join(f", {o}" for o in others),
        f"GPUs     {number(devices.get('gpus_used'))} of {number(devices.get('gpus_total'))} in use",
        f"CPUs     {number(devices.get('cpus_used'))} of {number(devices.get('cpus_total'))} in use",
        f"jobs     {', '.join(counts) or 'none open'}",
    ]
    lines += [f"failing  {failing_loop_text(loop)}" for loop in view.get("failing") or ()]
    if port := view.get("taken_service_port"):
        lines.append(f"services {taken_port_text(port)}")
    if away := view.get("unanswered"):
        why = f" ({one_line(away['why'])})" if away.get("why") else ""
        lines.append(f"cluster  {unanswered_engine_text(view['engine'], away)}{why}")
    head = view.get("events_head")
    if isinstance(head, dict):
        lines.append(f"events   {head.get('seq')}, head {one_line(head.get('hash') or '')[:16]}")
    return lines
