"""What a job has saved, as its directory shows it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import Query, Request, Response

from shoal.api import views
from shoal.api.call import answer, call_of
from shoal.api.queries import CheckpointsQuery
from shoal.api.render import render_job
from shoal.api.routes.jobs import load_job
from shoal.api.routing import Routes
from shoal.control.frozen import spec_of
from shoal.engines.base import (
    SavedCheckpoint,
    SavedCheckpoints,
    SaveDecision,
    SavedState,
    SupportsCheckpoints,
)
from shoal.identity import Permission

routes = Routes("checkpoints")

VERIFY_S = 20.0
"""About 20 to 40 GB on a fast disk; what is left stays unverified and is said to be."""
IN_MEMORY = "memory"
"""Gone with the job's processes."""
USABLE = (SavedState.COMPLETE, SavedState.VERIFIED)


@routes.add("GET", "/v1/jobs/{job_id}/checkpoints", Permission.JOB_READ, answers=views.CheckpointsView)
async def list_checkpoints(
    request: Request, job_id: str, query: Annotated[CheckpointsQuery, Query()]
) -> Response:
    """A job's checkpoints, the newest first, how often it saves, and what else is in its directory."""
    call = call_of(request)
    job, attempts = await load_job(call, job_id)
    call.allow(job.project, job_id=job.job_id)
    engine, found = call.plane.core.engine, SavedCheckpoints()
    if isinstance(engine, SupportsCheckpoints):
        found = await engine.saved(job.job_id, VERIFY_S if query.verify else 0.0)
    shown = render_job(job, attempts[-1])
    following = next((one for one in found.items if one.state in USABLE), None)
    view: views.CheckpointsView = {
        "ref": shown["ref"],
        "name": shown["name"],
        "status": shown["status"],
        "has_directory": spec_of(job).checkpoint is not None,
        "items": [_render(one, is_next=one is following, is_open=job.outcome is None) for one in found.items],
        "decision": None if found.decision is None else _decision(found.decision),
        "own": [
            {
                "name": one.name,
                "saved_at": one.saved_at,
                "size_bytes": one.size_bytes,
                "problem": one.problem,
            }
            for one in found.own
        ],
        "num_own": found.num_own,
        "is_own_cut": found.is_own_cut,
    }
    return answer(view)


def _render(one: SavedCheckpoint, *, is_next: bool, is_open: bool) -> views.CheckpointView:
    return {
        "step": one.step,
        "epoch": one.epoch,
        "generation": one.generation,
        "saved_at": one.saved_at,
        "size_bytes": one.size_bytes,
        "world_size": one.world_size,
        "places": [place for place in one.places if is_open or place != IN_MEMORY],
        "state": one.state.value,
        "problem": one.problem,
        "is_next": is_next,
    }


def _decision(made: SaveDecision) -> views.SaveDecisionView:
    return msgspec.convert(msgspec.to_builtins(made), views.SaveDecisionView)
