"""Jobs in a rack together never draw more than its cap, whatever starts and ends."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shoal.model.attempt import NodeTask
from shoal.model.job import GpuRequest, ResourceRequest, TopologyRequest
from shoal.model.node import Window, WindowKind
from shoal.scheduler import Candidate, GpuInfo, NodeInfo, Planner, Policy, WaitReason
from shoal.scheduler.facts.cluster_state import holding_of
from shoal.scheduler.facts.policy import PriorityClass

GPUS = tuple(GpuInfo(index, "H100") for index in range(4))
CAP, IDLE, GPU, CPU = 3000.0, 100.0, 700.0, 10.0


NEAR = TopologyRequest(within="rack")
APART = TopologyRequest(within=None, spread="nvlink")


def _node(name: str, rack: str, gpu_watts: float = GPU) -> NodeInfo:
    labels = {
        "rack": rack,
        "nvlink": name,
        "idle_watts": f"{IDLE:g}",
        "gpu_watts": f"{gpu_watts:g}",
        "cpu_watts": f"{CPU:g}",
    }
    return NodeInfo(name=name, cpus=16.0, memory_bytes=64, gpus=GPUS, labels=labels)


def _job(number: int, nodes: int, most: int, gpus: int, **fields: Any) -> Candidate:
    gpu_request = GpuRequest(count=gpus) if gpus else None
    priority = fields.pop("priority", 0)
    request = ResourceRequest(
        min_nodes=nodes, max_nodes=max(nodes, most), cpus=2.0, gpus=gpu_request, **fields
    )
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
        for task in holding.allocation:
            drawn[racks[task.node]] += GPU * len(task.gpu_ids) * task.gpu_milli / 1000 + CPU * task.cpus
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
    """Jobs arrive, end, or are evicted for others. State kept between plans changes no plan."""
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
        fresh_plan = Planner.of(planner.snapshot(), policy).plan(float(now))
        result = planner.plan(float(now))
        assert (result.starts, result.promises) == (fresh_plan.starts, fresh_plan.promises)
        for eviction in result.evictions:
            held = next(
                item for item in planner.snapshot().holdings if item.attempt_id == eviction.attempt_id
            )
            planner.hold(msgspec.structs.replace(held, is_stopping=True))
        assert _drawn(planner)["r0"] <= CAP


def test_start_that_takes_power_changes_the_node_of_another_promise() -> None:
    policy = Policy(power_caps={"r0": CAP}, patience_s=5.0, patience_factor=0.0)
    planner = Planner(policy)
    for number in range(4):
        planner.set_node(_node(f"n{number}", f"r{number % 2}"))
    for now, job in enumerate((_job(0, 3, 3, 3), _job(1, 1, 1, 2, priority=60), _job(2, 1, 1, 1))):
        planner.add(job)
        for eviction in planner.plan(float(now)).evictions:
            held = next(
                item for item in planner.snapshot().holdings if item.attempt_id == eviction.attempt_id
            )
            planner.hold(msgspec.structs.replace(held, is_stopping=True))
    planner.add(_job(3, 1, 1, 0))
    fresh_plan = Planner.of(planner.snapshot(), policy).plan(3.0)
    assert planner.plan(3.0).promises == fresh_plan.promises


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
    """Every job runs to its limit, and no new job comes: the job that is promised first starts by then or
    earlier.
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
        result = planner.plan(now)
        started = {start.attempt_id for start in result.starts}
        first = next(iter(result.promises), None)
        for attempt_id, at in promised.items():
            assert attempt_id in started or now < at
        promised = {} if first is None or first.at is None else {first.attempt_id: first.at}
        ends = {
            item.attempt_id: item.placed_at + (item.time_limit_s or 0.0)
            for item in planner.snapshot().holdings
        }
        moments = [*ends.values(), *promised.values(), *([result.replan_at] if result.replan_at else [])]
        if not moments:
            return
        now = min(moments)
        for attempt_id, at in ends.items():
            if at == now:
                planner.release(attempt_id, now)


def test_no_job_starts_on_power_that_a_promise_needs() -> None:
    """The second job waits for its rack's power, not for a node. The third would use that power for
    longer.
    """
    planner = Planner(Policy(power_caps={"r0": CAP}))
    for name in ("n0", "n1", "n2"):
        planner.set_node(_node(name, "r0"))
    planner.hold(holding_of(_job(1, 1, 1, 2, time_limit_s=100.0), _on("n0", 2), 0.0))
    planner.add(_job(2, 1, 1, 3, time_limit_s=1000.0))
    planner.add(_job(3, 1, 1, 1, time_limit_s=500.0))
    planner.add(_job(4, 1, 1, 0, time_limit_s=99.0))
    result = planner.plan(0.0)
    assert [start.attempt_id for start in result.starts] == ["a04"]
    assert [(item.attempt_id, item.at) for item in result.promises] == [("a02", 100.0)]
    explanation = planner.explain("a03", 0.0)
    assert explanation is not None
    assert explanation.why is WaitReason.BEHIND


def test_gang_takes_nodes_where_there_is_power() -> None:
    """The rack that fits best has power for one node only; the other rack has it for two."""
    planner = Planner(Policy(power_caps={"r0": 2 * IDLE + 3 * GPU}))
    for name, rack in (("n0", "r0"), ("n1", "r0"), ("n2", "r1")):
        planner.set_node(_node(name, rack))
    planner.add(_job(1, 2, 2, 2))
    (start,) = planner.plan(0.0).starts
    assert {task.node for task in start.allocation} == {"n0", "n2"}


def test_job_that_its_rack_can_never_power_is_explained_and_reserves_nothing() -> None:
    planner = Planner(Policy(power_caps={"r0": IDLE + GPU}, patience_s=0.0, patience_factor=0.0))
    planner.set_node(_node("n0", "r0"))
    planner.add(_job(1, 1, 1, 4))
    assert planner.plan(10.0).promises == ()
    explanation = planner.explain("a01", 10.0)
    assert explanation is not None
    assert explanation.why is WaitReason.POWER
    assert (
        explanation.hint
        == "it cannot start with this request: ask for less on each node, or an operator raises `power_caps`"
    )


def test_privileged_job_evicts_none_if_there_is_no_power() -> None:
    """Its victim draws the power of 2 GPUs. The new job would draw that of 4, and the rack has no more."""
    planner = Planner(Policy(power_caps={"r0": IDLE + 3 * GPU}))
    planner.set_node(_node("n0", "r0"))
    planner.set_node(_node("n1", "r1"))
    for number, name in ((1, "n0"), (2, "n1")):
        planner.hold(holding_of(_job(number, 1, 1, 2), _on(name, 2), 0.0))
    planner.add(_job(3, 1, 1, 4, priority=60))
    assert [item.attempt_id for item in planner.plan(60.0).evictions] == ["a02"]


def _on(name: str, gpus: int) -> tuple[NodeTask, ...]:
    return (NodeTask(node=name, cpus=2.0, memory_bytes=8, gpu_ids=tuple(range(gpus))),)


def test_job_that_waits_for_power_is_explained() -> None:
    planner = Planner(Policy(power_caps={"r0": CAP}))
    for name in ("n0", "n1"):
        planner.set_node(_node(name, "r0"))
    planner.add(_job(1, 1, 1, 3))
    planner.add(_job(2, 1, 1, 2))
    assert [start.attempt_id for start in planner.plan(0.0).starts] == ["a01"]
    explanation = planner.explain("a02", 0.0)
    assert explanation is not None
    assert explanation.why is WaitReason.POWER
    assert "rack `r0` may not draw more: 2,320 of 3,000 W are taken" in explanation.sentence
    planner.release("a01", 1.0)
    assert [start.attempt_id for start in planner.plan(1.0).starts] == ["a02"]
