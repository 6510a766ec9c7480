"""What is started in a rack together never draws more than its cap, whatever comes and goes."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shoal.model.attempt import NodeShare
from shoal.model.request import GpuRequest, Request, TopologyRequest
from shoal.model.window import Window, WindowKind
from shoal.scheduler import Candidate, GpuView, NodeView, Planner, Policy, Why
from shoal.scheduler.book import holding_of
from shoal.scheduler.classes import PriorityClass

GPUS = tuple(GpuView(index, "H100") for index in range(4))
CAP, IDLE, GPU, CPU = 3000.0, 100.0, 700.0, 10.0


NEAR = TopologyRequest(within="rack")
APART = TopologyRequest(within=None, spread="nvlink")


def _node(name: str, rack: str, gpu_watts: float = GPU) -> NodeView:
    labels = {
        "rack": rack,
        "nvlink": name,
        "idle_watts": f"{IDLE:g}",
        "gpu_watts": f"{gpu_watts:g}",
        "cpu_watts": f"{CPU:g}",
    }
    return NodeView(name=name, cpus=16.0, memory_bytes=64, gpus=GPUS, labels=labels)


def _job(number: int, nodes: int, most: int, gpus: int, **fields: Any) -> Candidate:
    asked = GpuRequest(count=gpus) if gpus else None
    priority = fields.pop("priority", 0)
    request = Request(min_nodes=nodes, max_nodes=max(nodes, most), cpus=2.0, gpus=asked, **fields)
    return Candidate(
        attempt_id=f"a{number:02d}",
        job_id=f"j{number:02d}",
        project="p",
        order=number,
        priority=priority,
        submitted_at=float(number),
        request=request,
    )


def _drawn(planner: Planner) -> dict[str, float]:
    snapshot = planner.snapshot()
    racks = {view.name: view.labels["rack"] for view in snapshot.nodes}
    drawn = dict.fromkeys(racks.values(), 0.0)
    for view in snapshot.nodes:
        drawn[racks[view.name]] += IDLE
    for holding in snapshot.holdings:
        for share in holding.allocation:
            drawn[racks[share.node]] += GPU * len(share.gpu_ids) * share.gpu_milli / 1000 + CPU * share.cpus
    return drawn


@st.composite
def jobs(draw: st.DrawFn, number: int, limits: tuple[float | None, ...]) -> Candidate:
    return _job(
        number,
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        draw(st.integers(0, 4)),
        is_exclusive=draw(st.sampled_from([False, False, True])),
        time_limit_s=draw(st.sampled_from(limits)),
        priority=draw(st.sampled_from([0, 0, 60])),
        topology=draw(st.sampled_from([None, None, NEAR, APART])),
    )


@given(st.data())
def test_no_rack_draws_more_than_its_cap(data: st.DataObject) -> None:
    """Whoever comes, goes, or is evicted for another; and what is known from before changes no plan."""
    policy = Policy(power_caps={"r0": CAP}, patience_s=5.0, patience_factor=0.0)
    planner = Planner(policy)
    for number in range(4):
        planner.set_node(_node(f"n{number}", f"r{number % 2}"))
    for now in range(data.draw(st.integers(0, 25))):
        holdings = planner.snapshot().holdings
        if data.draw(st.booleans()):
            planner.add(data.draw(jobs(now, (None, 3.0, 20.0))))
        elif holdings:
            planner.release(data.draw(st.sampled_from(holdings)).attempt_id, float(now))
        again = Planner.of(planner.snapshot(), policy).plan(float(now))
        made = planner.plan(float(now))
        assert (made.starts, made.promises) == (again.starts, again.promises)
        for eviction in made.evictions:
            held = next(one for one in planner.snapshot().holdings if one.attempt_id == eviction.attempt_id)
            planner.hold(msgspec.structs.replace(held, is_leaving=True))
        assert _drawn(planner)["r0"] <= CAP


def test_start_that_takes_power_changes_which_node_another_waits_for() -> None:
    policy = Policy(power_caps={"r0": CAP}, patience_s=5.0, patience_factor=0.0)
    planner = Planner(policy)
    for number in range(4):
        planner.set_node(_node(f"n{number}", f"r{number % 2}"))
    for now, job in enumerate((_job(0, 3, 3, 3), _job(1, 1, 1, 2, priority=60), _job(2, 1, 1, 1))):
        planner.add(job)
        for eviction in planner.plan(float(now)).evictions:
            held = next(one for one in planner.snapshot().holdings if one.attempt_id == eviction.attempt_id)
            planner.hold(msgspec.structs.replace(held, is_leaving=True))
    planner.add(_job(3, 1, 1, 0))
    again = Planner.of(planner.snapshot(), policy).plan(3.0)
    assert planner.plan(3.0).promises == again.promises


WINDOWS = st.builds(
    lambda node, begins, lasts: Window(
        window_id=node, kind=WindowKind.MAINTENANCE, nodes=(node,), from_at=begins, until_at=begins + lasts
    ),
    st.sampled_from(["n0", "n1", "n2"]),
    st.sampled_from([50.0, 160.0, 400.0]),
    st.sampled_from([60.0, 900.0]),
)


@given(st.data())
def test_promised_start_is_kept_under_caps(data: st.DataObject) -> None:
    """Everybody runs to their limit, and nobody comes: who is promised first starts by then, or sooner,
    though power, nodes and windows all stand in the way.
    """
    policy = Policy(power_caps={"r0": CAP, "r1": CAP / 2}, classes=(PriorityClass(name="batch", value=0),))
    planner = Planner(policy)
    watts = data.draw(st.sampled_from([(GPU,), (GPU, GPU / 2)]))
    for number in range(data.draw(st.integers(1, 6))):
        planner.set_node(_node(f"n{number}", f"r{number % 3}", watts[number % len(watts)]))
    planner.set_windows(data.draw(st.lists(WINDOWS, max_size=2, unique_by=lambda window: window.nodes)))
    for number in range(data.draw(st.integers(1, 12))):
        planner.add(data.draw(jobs(number, (50.0, 90.0, 1000.0))))
    now, promised = 100.0, dict[str, float]()
    while True:
        made = planner.plan(now)
        started = {start.attempt_id for start in made.starts}
        first = next(iter(made.promises), None)
        for attempt_id, at in promised.items():
            assert attempt_id in started or now < at
        promised = {} if first is None or first.at is None else {first.attempt_id: first.at}
        ends = {
            one.attempt_id: one.placed_at + (one.time_limit_s or 0.0) for one in planner.snapshot().holdings
        }
        moments = [*ends.values(), *promised.values(), *([made.look_again_at] if made.look_again_at else [])]
        if not moments:
            return
        now = min(moments)
        for attempt_id, at in ends.items():
            if at == now:
                planner.release(attempt_id, now)


def test_nobody_starts_on_power_that_a_promise_needs() -> None:
    """Its rack's power, not a node, is what the second job waits for: the third would take it for longer."""
    planner = Planner(Policy(power_caps={"r0": CAP}))
    for name in ("n0", "n1", "n2"):
        planner.set_node(_node(name, "r0"))
    planner.hold(holding_of(_job(1, 1, 1, 2, time_limit_s=100.0), _on("n0", 2), 0.0))
    planner.add(_job(2, 1, 1, 3, time_limit_s=1000.0))
    planner.add(_job(3, 1, 1, 1, time_limit_s=500.0))
    planner.add(_job(4, 1, 1, 0, time_limit_s=99.0))
    made = planner.plan(0.0)
    assert [start.attempt_id for start in made.starts] == ["a04"]
    assert [(one.attempt_id, one.at) for one in made.promises] == [("a02", 100.0)]
    told = planner.explain("a03", 0.0)
    assert told is not None
    assert told.why is Why.BEHIND


def test_gang_takes_nodes_where_there_is_power() -> None:
    """Of the rack that fits best only one node could be had; the other rack has two."""
    planner = Planner(Policy(power_caps={"r0": 2 * IDLE + 3 * GPU}))
    for name, rack in (("n0", "r0"), ("n1", "r0"), ("n2", "r1")):
        planner.set_node(_node(name, rack))
    planner.add(_job(1, 2, 2, 2))
    (start,) = planner.plan(0.0).starts
    assert {share.node for share in start.allocation} == {"n0", "n2"}


def test_job_that_its_rack_could_never_power_is_told_so_and_keeps_nothing() -> None:
    planner = Planner(Policy(power_caps={"r0": IDLE + GPU}, patience_s=0.0, patience_factor=0.0))
    planner.set_node(_node("n0", "r0"))
    planner.add(_job(1, 1, 1, 4))
    assert planner.plan(10.0).promises == ()
    told = planner.explain("a01", 10.0)
    assert told is not None
    assert told.why is Why.POWER
    assert told.hint == "it never starts so: ask for less on each node, or an operator raises `power_caps`"


def test_job_that_may_evict_is_given_no_room_where_there_is_no_power() -> None:
    """Its victim draws 2 GPUs' worth; what would start there draws 4, and the rack has no more for it."""
    planner = Planner(Policy(power_caps={"r0": IDLE + 3 * GPU}))
    planner.set_node(_node("n0", "r0"))
    planner.set_node(_node("n1", "r1"))
    for number, name in ((1, "n0"), (2, "n1")):
        planner.hold(holding_of(_job(number, 1, 1, 2), _on(name, 2), 0.0))
    planner.add(_job(3, 1, 1, 4, priority=60))
    assert [one.attempt_id for one in planner.plan(60.0).evictions] == ["a02"]


def _on(name: str, gpus: int) -> tuple[NodeShare, ...]:
    return (NodeShare(node=name, cpus=2.0, memory_bytes=8, gpu_ids=tuple(range(gpus))),)


def test_job_that_waits_for_power_is_told_so() -> None:
    planner = Planner(Policy(power_caps={"r0": CAP}))
    for name in ("n0", "n1"):
        planner.set_node(_node(name, "r0"))
    planner.add(_job(1, 1, 1, 3))
    planner.add(_job(2, 1, 1, 2))
    assert [start.attempt_id for start in planner.plan(0.0).starts] == ["a01"]
    told = planner.explain("a02", 0.0)
    assert told is not None
    assert told.why is Why.POWER
    assert "rack `r0` may not draw more: 2,320 of 3,000 W are taken" in told.sentence
    planner.release("a01", 1.0)
    assert [start.attempt_id for start in planner.plan(1.0).starts] == ["a02"]
