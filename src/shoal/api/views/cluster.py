"""Views of the cluster as a whole: status, health, the verdict on the audit, and drills. Pure."""

from __future__ import annotations

from typing_extensions import TypedDict

from shoal.api.views.schema import HeadView, UnansweredView
from shoal.control.commands.audit import AuditVerdict
from shoal.control.commands.drills import DrillRecord
from shoal.model.drill import DrillReport


class NodeCountsView(TypedDict):
    total: int
    ready: int
    cordoned: int
    draining: int
    drained: int
    dead: int
    silent: int
    closed: int
    gone: int  # not in another count


class DevicesView(TypedDict):
    gpus_total: int
    gpus_used: float
    cpus_total: float
    cpus_used: float


class FailingView(TypedDict):
    """A loop of the control plane whose last turns failed. `why` is for operators."""

    loop: str
    since: float
    times: int
    why: str | None


class OutageView(UnansweredView):
    """An unanswered cluster, with what came in place of its last answer. `why` is for operators."""

    why: str | None


class StatusView(TypedDict):
    """`counts` covers the open jobs of projects that the caller may see. `events_head` is for operators.

    `taken_service_port` is the port where services should be called. Null unless they have another port.
    """

    version: str
    store: str
    engine: str
    started_at: float
    counts: dict[str, int]
    nodes: NodeCountsView
    devices: DevicesView
    events_head: HeadView | None
    failing: list[FailingView]
    unanswered: OutageView | None
    taken_service_port: int | None


class HealthView(TypedDict):
    """`ok`, or `degraded` while a loop of the control plane keeps failing.

    A control plane on standby answers `standby`, and the leader's address.
    """

    status: str
    role: str


class DifferenceView(TypedDict):
    """A row that was changed without an event. `field` is empty if only one side has the row."""

    table: str
    row: str
    field: str
    in_table: str
    in_log: str
    event: int
    because: str


class AnchorView(TypedDict):
    """Where the log's end is remembered, and the entry remembered there."""

    path: str
    seq: int | None
    problem: str


class VerifyView(TypedDict):
    """`first_bad` is the first entry that does not follow from the earlier ones. If there is none, the tables
    are compared with the log: `differences` has the first hundred.
    """

    is_intact: bool
    first_bad: int | None
    because: str | None
    head: HeadView
    differences: list[DifferenceView]
    num_differences: int
    anchors: list[AnchorView]


def render_verdict(verdict: AuditVerdict) -> VerifyView:
    flaw, differences = verdict.flaw, verdict.differences
    because = flaw.reason if flaw else verdict.anchor_problem or next(map(str, differences), None)
    return {
        "is_intact": verdict.is_intact,
        "first_bad": flaw.seq if flaw else None,
        "because": because,
        "head": {"seq": verdict.head.seq, "hash": verdict.head.hash},
        "differences": [
            {
                "table": row.table,
                "row": row.row,
                "field": row.field,
                "in_table": row.in_table,
                "in_log": row.in_log,
                "event": row.seq,
                "because": str(row),
            }
            for row in differences
        ],
        "num_differences": verdict.num_differences,
        "anchors": [
            {
                "path": str(anchor.path),
                "seq": anchor.head.seq if anchor.head else None,
                "problem": anchor.problem,
            }
            for anchor in verdict.anchors
        ],
    }


class DrillReportView(TypedDict):
    """Seconds count from the act of the drill; null is unknown. `goodput` is over `window_s` from the act:
    `step_s` times the steps made in the window, divided by its length. `step_s` is the pace before the drill
    or after it, the faster of the two. If the program reported no step (`tells_steps` is false), `stepped_s`
    counts until its ranks ran again, shown by `sign`: `output`, `cpu` or `start`. `watched_s` is how long no
    rank failed from then on; `num_ended` is how often ranks that had begun again failed.
    """

    outcome: str
    because: str
    detail: str
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
    """`result` is null while the drill is under way."""

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
    result: DrillReportView | None


class DrillPageView(TypedDict):
    items: list[DrillView]
    next_cursor: str | None


def render_drill(held: DrillRecord) -> DrillView:
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


def _result(result: DrillReport) -> DrillReportView:
    return {
        "outcome": result.outcome.value,
        "because": result.because,
        "detail": result.detail,
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
