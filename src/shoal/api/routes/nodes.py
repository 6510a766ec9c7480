"""List nodes; cordon, drain, resume them, declare them dead or remove them.

Maintenance windows and reservations.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated

from fastapi import Query, Request, Response

from shoal.api.call import Call, call_of, idempotency_key, json_response
from shoal.api.http.bodies import read_model
from shoal.api.queries import NoQuery
from shoal.api.requests import NewWindow, NodeBody
from shoal.api.routing import RouteGroup
from shoal.api.views import schema
from shoal.api.views.render import render_node, render_window
from shoal.control.commands import nodes as node_commands
from shoal.control.commands import windows as window_commands
from shoal.control.commands.explain import is_not_handed_over
from shoal.control.commands.nodes import NodeStateChange, find_node
from shoal.control.commands.windows import WindowRequest, jobs_in_the_way
from shoal.control.memory.leases import QUIET_S
from shoal.identity import Permission
from shoal.model.attempt import Attempt
from shoal.model.job import Job
from shoal.model.node import Node, NodeState, Window, WindowKind
from shoal.store import Tx

Holding = list[tuple[Job, Attempt]]
node_routes = RouteGroup("nodes")


@node_routes.add("GET", "/v1/nodes", Permission.NODE_READ, answers=schema.NodePageView)
async def list_nodes(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """Every node, with what is in use. Jobs that you may not see are counted but not named."""
    call = call_of(request)
    view: schema.NodePageView = {"items": await _node_views(call), "next_cursor": None}
    return json_response(view)


@node_routes.add("GET", "/v1/nodes/{name}", Permission.NODE_READ, answers=schema.NodeView)
async def show_node(request: Request, name: str, query: Annotated[NoQuery, Query()]) -> Response:
    """One node."""
    return json_response((await _node_views(call_of(request), name))[0])


@node_routes.add(
    "POST", "/v1/nodes/{name}/cordon", Permission.NODE_MANAGE, answers=schema.NodeView, body=NodeBody
)
async def cordon_node(request: Request, name: str, query: Annotated[NoQuery, Query()]) -> Response:
    """The node takes no new work. Running jobs keep running."""
    return await _set_state(request, name, NodeState.CORDONED)


@node_routes.add(
    "POST", "/v1/nodes/{name}/drain", Permission.NODE_MANAGE, answers=schema.NodeView, body=NodeBody
)
async def drain_node(request: Request, name: str, query: Annotated[NoQuery, Query()]) -> Response:
    """The node takes no new work. Running jobs are asked to stop and queue again."""
    return await _set_state(request, name, NodeState.DRAINING)


@node_routes.add(
    "POST", "/v1/nodes/{name}/resume", Permission.NODE_MANAGE, answers=schema.NodeView, body=NodeBody
)
async def resume_node(request: Request, name: str, query: Annotated[NoQuery, Query()]) -> Response:
    """The node takes work again."""
    return await _set_state(request, name, NodeState.READY)


@node_routes.add(
    "POST",
    "/v1/nodes/{name}/declare-dead",
    Permission.NODE_MANAGE,
    answers=schema.NodeDeclaredDeadView,
    body=NodeBody,
)
async def declare_node_dead(request: Request, name: str, query: Annotated[NoQuery, Query()]) -> Response:
    """Declare that no process of ours runs there any more. Its jobs start elsewhere."""
    call = call_of(request)
    decided = await _decide(request, name, NodeState.DEAD)
    jobs = await call.core.records.store.read(
        lambda tx: [tx.jobs.get(job) for job in decided.restarted_job_ids]
    )
    visible = call.visible()
    named = sorted(job.reference for job in jobs if job and (visible is None or job.project in visible))
    view: schema.NodeDeclaredDeadView = {**(await _node_views(call, name))[0], "begin_anew": named}
    return json_response(view)


@node_routes.add("DELETE", "/v1/nodes/{name}", Permission.NODE_MANAGE, answers=schema.NodeRemovedView)
async def remove_node(request: Request, name: str, query: Annotated[NoQuery, Query()]) -> Response:
    """Remove a node that does not answer and holds nothing."""
    call = call_of(request)
    await node_commands.remove_node(
        call.core.records, call.core.link.outages, call.actor, name, key=idempotency_key(request)
    )
    view: schema.NodeRemovedView = {"name": name}
    return json_response(view)


async def _set_state(request: Request, name: str, state: NodeState) -> Response:
    await _decide(request, name, state)
    return json_response((await _node_views(call_of(request), name))[0])


async def _decide(request: Request, name: str, state: NodeState) -> NodeStateChange:
    call = call_of(request)
    key = idempotency_key(request)
    body = await read_model(request, NodeBody)
    return await node_commands.set_node_state(
        call.core.upkeep, call.actor, name, state, body.because, key=key
    )


async def _node_views(call: Call, name: str | None = None) -> list[schema.NodeView]:
    """The view of that node, or of all nodes by name."""
    core = call.core

    def load(tx: Tx) -> tuple[list[Node], Holding]:
        if name is None:
            return sorted(tx.nodes.all(), key=lambda node: node.name), tx.attempts.holding()
        return [find_node(tx, name)], tx.attempts.holding()

    nodes, holding = await core.records.store.read(load)
    by_node: dict[str, Holding] = defaultdict(list)
    silent: dict[str, list[Job]] = defaultdict(list)
    for job, attempt in holding:
        for node_name in attempt.node_names:
            by_node[node_name].append((job, attempt))
        if not is_not_handed_over(core.running, core.link.outages, attempt):
            for node_name in core.running.leases.silent_nodes(attempt, QUIET_S):
                silent[node_name].append(job)
    return [
        render_node(node, by_node[node.name], call.visible(), core.link.outages.reported, silent[node.name])
        for node in nodes
    ]


window_routes = RouteGroup("windows")


@window_routes.add("GET", "/v1/windows", Permission.NODE_READ, answers=schema.WindowPageView)
async def list_windows(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """Maintenance and reservations that are not over. The earliest to begin comes first."""
    call = call_of(request)
    now = call.core.records.clock.now()
    windows = await call.core.records.store.read(lambda tx: tx.windows.open(now))
    view: schema.WindowPageView = {"items": await _window_views(call, windows), "next_cursor": None}
    return json_response(view)


@window_routes.add(
    "POST", "/v1/windows", Permission.NODE_MANAGE, answers=schema.WindowView, status=201, body=NewWindow
)
async def declare_window(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """Keep nodes free of jobs, or for one project. Jobs that could be in the way do not start; running jobs
    keep running.
    """
    call = call_of(request)
    key = idempotency_key(request)
    body = await read_model(request, NewWindow, max_bytes=call.core.settings.limits.max_body_bytes)
    window_request = WindowRequest(
        kind=WindowKind(body.kind),
        nodes=tuple(body.nodes),
        count=body.count,
        pool=body.pool,
        from_at=body.from_at,
        duration_s=body.duration_s,
        project=body.project,
        because=body.because,
    )
    window = await window_commands.declare_window(call.core.records, call.actor, window_request, key=key)
    return json_response((await _window_views(call, [window]))[0], 201)


@window_routes.add("DELETE", "/v1/windows/{window_id}", Permission.NODE_MANAGE, answers=schema.WindowView)
async def cancel_window(request: Request, window_id: str, query: Annotated[NoQuery, Query()]) -> Response:
    """Cancel a window: the nodes are open to all jobs again."""
    call = call_of(request)
    window = await window_commands.cancel_window(
        call.core.records, call.actor, window_id, key=idempotency_key(request)
    )
    return json_response((await _window_views(call, [window]))[0])


async def _window_views(call: Call, windows: list[Window]) -> list[schema.WindowView]:
    core, visible = call.core, call.visible()
    now = core.records.clock.now()
    if not windows:
        return []

    def look(tx: Tx) -> list[schema.WindowView]:
        # In the reader's thread: with many windows and jobs it takes longer than the loop may block.
        holding, projects = tx.attempts.holding(), tx.people.projects()
        there = jobs_in_the_way(windows, holding, projects, now)
        return [
            render_window(window, [job for job, _ in users], visible)
            for window, users in zip(windows, there, strict=True)
        ]

    return await core.records.store.read(look)
