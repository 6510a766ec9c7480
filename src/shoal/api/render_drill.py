"""Drills as clients see them. Pure."""

from __future__ import annotations

from shoal.api import drill_views
from shoal.control.drills import Held
from shoal.model.drill import DrillResult


def render_drill(held: Held) -> drill_views.DrillView:
    drill = held.drill
    return {
        "id": drill.drill_id,
        "kind": drill.kind.value,
        "job_id": drill.job_id or None,
        "ref": held.ref,
        "project": held.project,
        "node": drill.node or None,
        "rank": drill.rank,
        "for_s": drill.for_s or None,
        "by": drill.by,
        "started_at": drill.started_at,
        "result": _result(held.result) if held.result is not None else None,
    }


def _result(result: DrillResult) -> drill_views.DrillResultView:
    return {
        "outcome": result.outcome.value,
        "because": result.because,
        "told": result.told,
        "noticed_s": result.noticed_s,
        "stepped_s": result.stepped_s,
        "sign": result.sign.value if result.sign is not None else None,
        "watched_s": result.watched_s,
        "num_ended": result.num_ended,
        "steps_lost": result.steps_lost,
        "goodput": result.goodput,
        "window_s": result.window_s,
        "step_s": result.step_s,
        "new_attempts": result.new_attempts,
        "tells_steps": result.tells_steps,
        "finished_at": result.finished_at,
    }
