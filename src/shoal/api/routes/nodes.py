"""Look at nodes; cordon, drain, resume them, declare them dead or remove them."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated

from fastapi import Query, Request, Response

from shoal.api import views
from shoal.api.bodies import read_model
from shoal.api.call import Call, answer, call_of, idempotency_key
from shoal.api.queries import NoQuery
from shoal.api.render import render_node
from shoal.api.requests import NodeBody
from shoal.api.routing import Routes
from shoal.control.explain import is_kept_here
from shoal.control.leases import QUIET_S
from shoal.control.nodes import Decided, find_node
from shoal.identity import Permission
from shoal.model.attempt import Attempt
from shoal.model.job import Job
from shoal.model.node import Node, NodeState
from shoal.store import Tx

Holding = list[tuple[Job, Attempt]]
routes = Routes("nodes")


@routes.add("GET", "/v1/nodes", Permission.NODE_READ, answers=views.NodePageView)
async def list_nodes(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """Every node, with what is in use. Jobs that you may not see are counted but not named."""
    call = call_of(request)
    view: views.NodePageView = {"items": await _views(call), "next_cursor": None}
    return answer(view)


@routes.add("GET", "/v1/nodes/{name}", Permission.NODE_READ, answers=views.NodeView)
async def show_node(request: Request, name: str, query: Annotated[NoQuery, Query()]) -> Response:
    """One node."""
    return answer((await _views(call_of(request), name))[0])


@routes.add("POST", "/v1/nodes/{name}/cordon", Permission.NODE_MANAGE, answers=views.NodeView, body=NodeBody)
async def cordon_node(request: Request, name: str, query: Annotated[NoQuery, Query()]) -> Response:
    """No new work goes there; what runs there runs on."""
    return await _set(request, name, NodeState.CORDONED)


@routes.add("POST", "/v1/nodes/{name}/drain", Permission.NODE_MANAGE, answers=views.NodeView, body=NodeBody)
async def drain_node(request: Request, name: str, query: Annotated[NoQuery, Query()]) -> Response:
    """No new work goes there; what runs there is asked to stop and queued again."""
    return await _set(request, name, NodeState.DRAINING)


@routes.add("POST", "/v1/nodes/{name}/resume", Permission.NODE_MANAGE, answers=views.NodeView, body=NodeBody)
async def resume_node(request: Request, name: str, query: Annotated[NoQuery, Query()]) -> Response:
    """The node takes work again."""
    return await _set(request, name, NodeState.READY)


@routes.add(
    "POST",
    "/v1/nodes/{name}/declare-dead",
    Permission.NODE_MANAGE,
    answers=views.NodeDeclaredDeadView,
    body=NodeBody,
)
async def declare_node_dead(request: Request, name: str, query: Annotated[NoQuery, Query()]) -> Response:
    """Vouch that nothing runs there any more: its jobs are started elsewhere."""
    call = call_of(request)
    decided = await _decide(request, name, NodeState.DEAD)
    jobs = await call.plane.core.store.read(lambda tx: [tx.jobs.get(job) for job in decided.begin_anew])
    visible = call.visible()
    named = sorted(job.reference for job in jobs if job and (visible is None or job.project in visible))
    view: views.NodeDeclaredDeadView = {**(await _views(call, name))[0], "begin_anew": named}
    return answer(view)


@routes.add("DELETE", "/v1/nodes/{name}", Permission.NODE_MANAGE, answers=views.NodeRemovedView)
async def remove_node(request: Request, name: str, query: Annotated[NoQuery, Query()]) -> Response:
    """Take a node off the list that does not answer and holds nothing."""
    call = call_of(request)
    await call.plane.remove_node(call.actor, name, key=idempotency_key(request))
    view: views.NodeRemovedView = {"name": name}
    return answer(view)


async def _set(request: Request, name: str, state: NodeState) -> Response:
    await _decide(request, name, state)
    return answer((await _views(call_of(request), name))[0])


async def _decide(request: Request, name: str, state: NodeState) -> Decided:
    call = call_of(request)
    key = idempotency_key(request)
    body = await read_model(request, NodeBody)
    return await call.plane.set_node_state(call.actor, name, state, body.because, key=key)


async def _views(call: Call, name: str | None = None) -> list[views.NodeView]:
    """Of that node, or of all by name."""
    core = call.plane.core

    def load(tx: Tx) -> tuple[list[Node], Holding]:
        if name is None:
            return sorted(tx.nodes.all(), key=lambda node: node.name), tx.attempts.holding()
        return [find_node(tx, name)], tx.attempts.holding()

    nodes, holding = await core.store.read(load)
    by_node: dict[str, Holding] = defaultdict(list)
    silent: dict[str, list[Job]] = defaultdict(list)
    for job, attempt in holding:
        for node_name in attempt.node_names:
            by_node[node_name].append((job, attempt))
        if not is_kept_here(core, attempt):
            for node_name in core.leases.silent_nodes(attempt, QUIET_S):
                silent[node_name].append(job)
    return [
        render_node(node, by_node[node.name], call.visible(), core.outages.told, silent[node.name])
        for node in nodes
    ]
