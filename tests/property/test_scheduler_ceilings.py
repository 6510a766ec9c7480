"""Whatever parts of GPUs, gangs and whole nodes projects ask for, no plan lets one pass what it may have."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.model.people import Devices
from shoal.model.request import GpuRequest, Request
from shoal.scheduler import Policy, Snapshot, plan
from shoal.scheduler.devices import ProjectView
from tests.support.clusters import NOW, job, node

PARTS = st.sampled_from([10, 330, 500, 990, 1000])


@st.composite
def requests(draw: st.DrawFn) -> Request:
    milli = draw(PARTS)
    count = 1 if milli < 1000 else draw(st.integers(0, 3))
    least = draw(st.integers(1, 2))
    return Request(
        gpus=GpuRequest(count=count, milli=milli) if count else None,
        cpus=draw(st.sampled_from([0.5, 2.0])),
        min_nodes=least,
        max_nodes=least + draw(st.integers(0, 2)),
        is_exclusive=draw(st.booleans()),
        time_limit_s=draw(st.sampled_from([None, 60.0])),
    )


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.lists(st.tuples(requests(), st.sampled_from("ab")), max_size=8),
    st.integers(0, 6),
    st.sampled_from([4.0, 8.0, 100.0]),
)
def test_no_project_passes_its_limit(
    sizes: list[int], asked: list[tuple[Request, str]], num_gpus: int, cpus: float
) -> None:
    limit = Devices(gpus=num_gpus, cpus=cpus)
    facts = Snapshot(
        nodes=tuple(node(f"n{number}", gpus=size, cpus=4.0) for number, size in enumerate(sizes)),
        holdings=(),
        candidates=tuple(
            job(number, request, project=project) for number, (request, project) in enumerate(asked)
        ),
        projects=(ProjectView(name="a", parent="all"), ProjectView(name="all", limit=limit)),
    )
    told = plan(facts, Policy(), NOW)
    projects = {one.attempt_id: one.project for one in facts.candidates}
    shares = [s for start in told.starts if projects[start.attempt_id] == "a" for s in start.allocation]
    assert sum(len(share.gpu_ids) * share.gpu_milli for share in shares) <= num_gpus * 1000
    assert sum(share.cpus for share in shares) <= cpus
    started = {start.attempt_id for start in told.starts}
    assert {said.attempt_id for said in told.explanations} == projects.keys() - started
