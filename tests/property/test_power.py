"""What is started in a rack together never draws more than its cap, whatever comes and goes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.model.request import GpuRequest, Request
from shoal.scheduler import Candidate, GpuView, NodeView, Planner, Policy, Why

GPUS = tuple(GpuView(index, "H100") for index in range(4))
CAP, IDLE, GPU, CPU = 3000.0, 100.0, 700.0, 10.0


def _node(name: str, rack: str) -> NodeView:
    labels = {"rack": rack, "idle_watts": f"{IDLE:g}", "gpu_watts": f"{GPU:g}", "cpu_watts": f"{CPU:g}"}
    return NodeView(name=name, cpus=16.0, memory_bytes=64, gpus=GPUS, labels=labels)


def _job(number: int, nodes: int, most: int, gpus: int, *, is_exclusive: bool = False) -> Candidate:
    asked = GpuRequest(count=gpus) if gpus else None
    request = Request(
        min_nodes=nodes, max_nodes=max(nodes, most), cpus=2.0, gpus=asked, is_exclusive=is_exclusive
    )
    return Candidate(
        attempt_id=f"a{number}",
        job_id=f"j{number}",
        project="p",
        order=number,
        submitted_at=0.0,
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


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "end"]),
        st.integers(1, 3),
        st.integers(1, 4),
        st.integers(0, 4),
        st.booleans(),
    ),
    max_size=25,
)


@given(STEPS)
def test_no_rack_draws_more_than_its_cap(steps: list[tuple[str, int, int, int, bool]]) -> None:
    policy = Policy(power_caps={"r0": CAP})
    planner = Planner(policy)
    for number in range(4):
        planner.set_node(_node(f"n{number}", f"r{number % 2}"))
    for now, (what, nodes, most, gpus, is_exclusive) in enumerate(steps):
        holdings = planner.snapshot().holdings
        if what == "add":
            planner.add(_job(now, nodes, most, gpus, is_exclusive=is_exclusive))
        elif holdings:
            planner.release(holdings[nodes % len(holdings)].attempt_id, float(now))
        again = Planner.of(planner.snapshot(), policy)
        made = planner.plan(float(now))
        assert made.starts == again.plan(float(now)).starts
        assert _drawn(planner)["r0"] <= CAP


def test_job_that_waits_for_power_is_told_so() -> None:
    planner = Planner(Policy(power_caps={"r0": CAP}))
    for name in ("n0", "n1"):
        planner.set_node(_node(name, "r0"))
    planner.add(_job(1, 1, 1, 3))
    planner.add(_job(2, 1, 1, 2))
    assert [start.attempt_id for start in planner.plan(0.0).starts] == ["a1"]
    told = planner.explain("a2", 0.0)
    assert told is not None
    assert told.why is Why.POWER
    assert "rack `r0` may not draw more: 2,320 of 3,000 W are taken" in told.sentence
    planner.release("a1", 1.0)
    assert [start.attempt_id for start in planner.plan(1.0).starts] == ["a2"]
