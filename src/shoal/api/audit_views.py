"""The verdict on the audit, as it is sent."""

from __future__ import annotations

from typing_extensions import TypedDict

from shoal.api.views import HeadView
from shoal.control.audit import Verdict


class DifferenceView(TypedDict):
    """A row that somebody changed without an event. `field` is empty where the whole row is in one alone."""

    table: str
    row: str
    field: str
    in_table: str
    in_log: str
    event: int
    because: str


class AnchorView(TypedDict):
    """Where the log's end is remembered, and what is remembered there."""

    path: str
    seq: int | None
    problem: str


class VerifyView(TypedDict):
    """`first_bad` is the first entry that does not follow from those before it. Without one, tables are
    compared with the log: `differences` has the first hundred.
    """

    is_intact: bool
    first_bad: int | None
    because: str | None
    head: HeadView
    differences: list[DifferenceView]
    num_differences: int
    anchors: list[AnchorView]


def render_verdict(verdict: Verdict) -> VerifyView:
    flaw, differences = verdict.flaw, verdict.differences
    because = flaw.reason if flaw else verdict.anchor_problem or next(map(str, differences), None)
    return {
        "is_intact": verdict.is_intact,
        "first_bad": flaw.seq if flaw else None,
        "because": because,
        "head": {"seq": verdict.head.seq, "hash": verdict.head.hash},
        "differences": [
            {
                "table": one.table,
                "row": one.row,
                "field": one.field,
                "in_table": one.in_table,
                "in_log": one.in_log,
                "event": one.seq,
                "because": str(one),
            }
            for one in differences
        ],
        "num_differences": verdict.num_differences,
        "anchors": [
            {"path": str(one.path), "seq": one.head.seq if one.head else None, "problem": one.problem}
            for one in verdict.anchors
        ],
    }
