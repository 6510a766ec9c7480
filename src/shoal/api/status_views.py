"""What the API says of the cluster as a whole."""

from __future__ import annotations

from typing_extensions import TypedDict

from shoal.api.views import HeadView, UnansweredView


class NodeCountsView(TypedDict):
    total: int
    ready: int
    cordoned: int
    draining: int
    drained: int
    dead: int
    silent: int
    closed: int
    gone: int  # in no other count


class DevicesView(TypedDict):
    gpus_total: int
    gpus_used: float
    cpus_total: float
    cpus_used: float


class FailingView(TypedDict):
    """A loop of the control plane whose last turns failed; `why` is for operators."""

    loop: str
    since: float
    times: int
    why: str | None


class OutageView(UnansweredView):
    """With what came in place of the last answer; `why` is for operators."""

    why: str | None


class StatusView(TypedDict):
    """`counts` covers the open jobs of projects that the caller may see; `events_head` is for operators.

    `taken_service_port` is where services should be called; null unless they have another port.
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
    """`ok`, or `degraded` while something that the control plane does by itself keeps failing.

    One that stands by says `standby`, and where the leader is.
    """

    status: str
    role: str
