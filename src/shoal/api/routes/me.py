"""Who am I, how is the cluster, is anybody there, and what can be asked."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from fastapi import Query, Request, Response

from shoal import __version__
from shoal.api import status_views, views
from shoal.api.call import answer, call_of
from shoal.api.openapi import schema_bytes
from shoal.api.queries import NoQuery
from shoal.api.render import render_outage
from shoal.api.routing import Routes
from shoal.control.outage import Outage
from shoal.control.turns import Failing, Turns
from shoal.identity import Permission, is_at_least
from shoal.model.attempt import Attempt
from shoal.model.job import Job
from shoal.model.node import Node, NodeState
from shoal.model.people import Role
from shoal.store import Head, Tx

routes = Routes("cluster")
Loaded = tuple[list[Node], list[tuple[Job, Attempt]], dict[str, int], Head]


@routes.add("GET", "/healthz", None, answers=status_views.HealthView)
async def check_health(request: Request) -> Response:
    """Whether the server answers, and does its work. Says nothing else to anybody."""
    turns: Turns = request.app.state.turns
    view: status_views.HealthView = {"status": "degraded" if turns.failing else "ok", "role": "leader"}
    return answer(view)


@routes.add("GET", "/v1/me", Permission.ME_READ, answers=views.MeView)
async def show_me(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """Who this token stands for, and what it may do where."""
    call = call_of(request)
    caller = call.caller
    view: views.MeView = {
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
        "now": call.plane.core.clock.now(),
    }
    return answer(view)


@routes.add("GET", "/v1/status", Permission.STATUS_READ, answers=status_views.StatusView)
async def show_status(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """The cluster at a glance."""
    call = call_of(request)
    nodes, holding, counts, head = await call.plane.core.store.read(lambda tx: _load(tx, call.visible()))
    shares = [share for _, attempt in holding for share in attempt.allocation]
    there = [node for node in nodes if not node.is_gone]
    states = Counter(node.state for node in there)
    is_operator = is_at_least(call.caller.cluster_role, Role.OPERATOR)
    view: status_views.StatusView = {
        "version": __version__,
        "store": call.plane.settings.store_url.partition(":")[0].partition("+")[0],
        "engine": call.plane.core.engine.name,
        "started_at": call.services.started_at,
        "counts": counts,
        "nodes": {
            "total": len(there),
            "ready": sum(node.takes_work for node in there),
            "cordoned": states[NodeState.CORDONED],
            "draining": states[NodeState.DRAINING],
            "drained": states[NodeState.DRAINED],
            "dead": states[NodeState.DEAD],
            "silent": sum(not node.facts.answers and node.state is not NodeState.DEAD for node in there),
            "closed": sum(node.is_closed for node in there),
            "gone": len(nodes) - len(there),
        },
        "devices": {
            "gpus_total": sum(len(node.facts.gpus) for node in there),
            "gpus_used": sum(share.num_gpus for share in shares),
            "cpus_total": sum(node.facts.cpus for node in there),
            "cpus_used": sum(share.cpus for share in shares),
        },
        "events_head": {"seq": head.seq, "hash": head.hash} if is_operator else None,
        "failing": [_failing(one, is_operator=is_operator) for one in call.plane.core.turns.failing],
        "unanswered": _unanswered(call.plane.core.outages.told, is_operator=is_operator),
        "taken_service_port": call.plane.core.services.taken_port,
    }
    return answer(view)


def _failing(failing: Failing, *, is_operator: bool) -> status_views.FailingView:
    """What went wrong may name files and servers."""
    return {
        "loop": failing.loop,
        "since": failing.since,
        "times": failing.times,
        "why": failing.why if is_operator else None,
    }


def _unanswered(outage: Outage | None, *, is_operator: bool) -> status_views.OutageView | None:
    """A cluster's own words may name machines."""
    if outage is None:
        return None
    return {**render_outage(outage), "why": outage.why if is_operator else None}


def _load(tx: Tx, visible: tuple[str, ...] | None) -> Loaded:
    return tx.nodes.all(), tx.attempts.holding(), tx.jobs.count_by_status(visible), tx.events.head()


@routes.add("GET", "/openapi.json", Permission.SCHEMA_READ, answers=dict)
async def show_openapi(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """This API, described."""
    return Response(schema_bytes(request.app), media_type="application/json")
