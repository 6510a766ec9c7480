"""What runs speaks for itself: supervisors renew their lease, a job looks at itself."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
from fastapi import Query, Request, Response

from shoal.api import views
from shoal.api.bodies import decode_strictly, read_raw_json
from shoal.api.call import answer, call_of
from shoal.api.queries import NoQuery
from shoal.api.render import render_attempt, render_job
from shoal.api.requests import RenewalBody
from shoal.api.routes.jobs import load_job
from shoal.api.routing import Routes
from shoal.control import StaleRenewal
from shoal.errors import Denied, SpecError, Unauthenticated
from shoal.identity import Permission, proof_key
from shoal.proof import prove
from shoal.wire import Renewal, RenewalAnswer

routes = Routes("supervisor")


@routes.add(
    "POST", "/v1/supervisor/renew", Permission.LEASE_RENEW, answers=views.RenewalView, body=RenewalBody
)
async def renew_lease(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """A supervisor's sign of life, for its own attempt on its own node.

    A stale one is told so in a proven answer: a refusal could come from anybody on this port.
    """
    call = call_of(request)
    body = await read_raw_json(request)
    if hashlib.sha256(body).hexdigest() != call.caller.body_digest:
        raise Denied("this renewal is not the one that its supervisor signed")
    try:
        renewal = msgspec.convert(decode_strictly(body), Renewal)
    except msgspec.ValidationError as error:
        raise SpecError(f"not a renewal: {error}") from error
    if (renewal.attempt_id, renewal.node) != (call.caller.attempt_id, call.caller.node):
        raise Denied("this token renews the lease of another attempt or node")
    try:
        told = await call.plane.renew(renewal)
    except StaleRenewal as error:
        told = RenewalAnswer(is_stale=True, should_stop=True, grace_s=0.0, because=error.message)
    told = prove(proof_key(call.plane.core.key, renewal.attempt_id, renewal.node), renewal, told)
    view: views.RenewalView = {
        "should_stop": told.should_stop,
        "grace_s": told.grace_s,
        "because": told.because,
        "is_stale": told.is_stale,
        "generation": told.generation,
        "master_port": told.master_port,
        "is_after_hang": told.is_after_hang,
        "drill": None if told.drill is None else msgspec.to_builtins(told.drill),
        "should_sleep": told.should_sleep,
        "control_urls": list(told.control_urls),
        "proof": told.proof,
    }
    return answer(view)


@routes.add("GET", "/v1/self", Permission.JOB_SELF, answers=views.SelfView)
async def show_self(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """The job whose token this is."""
    call = call_of(request)
    assert call.caller.job_id is not None
    job, attempts = await load_job(call, call.caller.job_id)
    mine = next((a for a in attempts if a.attempt_id == call.caller.attempt_id), None)
    if mine is None:
        raise Unauthenticated("this job's attempt is over")
    shown = render_attempt(mine, call.plane.core.worlds.of(mine))
    view: views.SelfView = {"job": render_job(job, attempts[-1]), "attempt": shown}
    return answer(view)
