"""The caller, the cluster's status and health, and the description of this API."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from fastapi import Query, Request, Response

from shoal import __version__
from shoal.api.call import call_of, json_response
from shoal.api.queries import NoQuery
from shoal.api.routing import RouteGroup
from shoal.api.views import cluster, schema
from shoal.api.views.openapi import schema_bytes
from shoal.api.views.render import render_outage
from shoal.control.memory.health import EngineOutage, FailingLoop, LoopHealth
from shoal.identity import Permission, is_at_least
from shoal.model.attempt import Attempt
from shoal.model.job import Job
from shoal.model.node import Node, NodeState
from shoal.model.people import Role
from shoal.store import LogHead, Tx

routes = RouteGroup("cluster")
Loaded = tuple[list[Node], list[tuple[Job, Attempt]], dict[str, int], LogHead]


@routes.add("GET", "/healthz", None, answers=cluster.HealthView)
async def check_health(request: Request) -> Response:
    """Whether the server answers and does its work. Reveals nothing else."""
    turns: LoopHealth = request.app.state.turns
    view: cluster.HealthView = {"status": "degraded" if turns.failing else "ok", "role": "leader"}
    return json_response(view)


@routes.add("GET", "/v1/me", Permission.ME_READ, answers=schema.MeView)
async def show_me(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """The user or job of this token, and its rights."""
    call = call_of(request)
    caller = call.caller
    view: schema.MeView = {
        "actor": str(call.actor),
        "user": call.person().name,
        "cluster_role": caller.cluster_role.value if caller.cluster_role else None,
        "projects": [{"name": name, "role": role.value} for name, role in sorted(caller.roles.items())],
        "token": {
            "id": caller.token_id,
            "scope": caller.scope.value if caller.scope else None,
            "project": caller.only_project,
            "expires_at": caller.expires_at,
        },
        "now": call.core.records.clock.now(),
    }
    return json_response(view)


@routes.add("GET", "/v1/status", Permission.STATUS_READ, answers=cluster.StatusView)
async def show_status(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """The cluster at a glance."""
    call = call_of(request)
    nodes, holding, counts, head = await call.core.records.store.read(lambda tx: _load(tx, call.visible()))
    tasks = [task for _, attempt in holding for task in attempt.allocation]
    listed = [node for node in nodes if not node.is_gone]
    states = Counter(node.state for node in listed)
    is_operator = is_at_least(call.caller.cluster_role, Role.OPERATOR)
    view: cluster.StatusView = {
        "version": __version__,
        "store": call.core.settings.store_url.partition(":")[0].partition("+")[0],
        "engine": call.core.link.engine.name,
        "started_at": call.services.started_at,
        "counts": counts,
        "nodes": {
            "total": len(listed),
            "ready": sum(node.takes_work for node in listed),
            "cordoned": states[NodeState.CORDONED],
            "draining": states[NodeState.DRAINING],
            "drained": states[NodeState.DRAINED],
            "dead": states[NodeState.DEAD],
            "silent": sum(not node.facts.answers and node.state is not NodeState.DEAD for node in listed),
            "closed": sum(node.is_closed for node in listed),
            "gone": len(nodes) - len(listed),
        },
        "devices": {
            "gpus_total": sum(len(node.facts.gpus) for node in listed),
            "gpus_used": sum(task.num_gpus for task in tasks),
            "cpus_total": sum(node.facts.cpus for node in listed),
            "cpus_used": sum(task.cpus for task in tasks),
        },
        "events_head": {"seq": head.seq, "hash": head.hash} if is_operator else None,
        "failing": [_failing(failing, is_operator=is_operator) for failing in call.core.loop_health.failing],
        "unanswered": _unanswered(call.core.link.outages.reported, is_operator=is_operator),
        "taken_service_port": call.core.services.wanted_port,
    }
    return json_response(view)


def _failing(failing: FailingLoop, *, is_operator: bool) -> cluster.FailingView:
    """A failing loop. Its error may name files and servers, so only operators see it."""
    return {
        "loop": failing.loop,
        "since": failing.since,
        "times": failing.times,
        "why": failing.why if is_operator else None,
    }


def _unanswered(outage: EngineOutage | None, *, is_operator: bool) -> cluster.OutageView | None:
    """An unanswered cluster. Its own words may name machines, so only operators see them."""
    if outage is None:
        return None
    return {**render_outage(outage), "why": outage.why if is_operator else None}


def _load(tx: Tx, visible: tuple[str, ...] | None) -> Loaded:
    return tx.nodes.all(), tx.attempts.holding(), tx.jobs.count_by_status(visible), tx.events.head()


@routes.add("GET", "/openapi.json", Permission.SCHEMA_READ, answers=dict)
async def show_openapi(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """This API, described."""
    return Response(schema_bytes(request.app), media_type="application/json")
