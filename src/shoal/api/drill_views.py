"""Drills as the API shows them."""

from __future__ import annotations

from typing_extensions import TypedDict


class DrillResultView(TypedDict):
    """Seconds count from when it was done; null: not known. `goodput` is over `window_s` from then on: what
    the steps made in it would have taken at `step_s` each, over what it took. `step_s` is the pace before the
    drill or that after it, whichever is faster. Of a program that told of no step (`tells_steps` is false)
    `stepped_s` counts until its ranks ran again, by `sign`: `output`, `cpu` or `start`. `watched_s` is how
    long none of them failed from then on; `num_ended`, how often ranks that had begun again failed.
    """

    outcome: str
    because: str
    told: str
    noticed_s: float | None
    stepped_s: float | None
    sign: str | None
    watched_s: float | None
    num_ended: int
    steps_lost: int | None
    goodput: float | None
    window_s: float | None
    step_s: float | None
    new_attempts: int
    tells_steps: bool
    finished_at: float


class DrillView(TypedDict):
    """`result` is null while it is under way."""

    id: str
    kind: str
    job_id: str | None
    ref: str | None
    project: str | None
    node: str | None
    rank: int | None
    for_s: float | None
    by: str
    started_at: float
    result: DrillResultView | None


class DrillPageView(TypedDict):
    items: list[DrillView]
    next_cursor: str | None
