"""Whatever parts of GPUs, gangs and whole nodes projects ask for, no plan lets a project exceed its
ceiling.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.model.job import GpuRequest, ResourceRequest
from shoal.model.people import DeviceAmounts
from shoal.scheduler import Policy, Snapshot, plan
from shoal.scheduler.facts.amounts import ProjectInfo
from tests.support.clusters import NOW, candidate, node

PARTS = st.sampled_from([10, 330, 500, 990, 1000])


@st.composite
def requests(draw: st.DrawFn) -> ResourceRequest:
    milli = draw(PARTS)
    count = 1 if milli < 1000 else draw(st.integers(0, 3))
    least = draw(st.integers(1, 2))
    return ResourceRequest(
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
    sizes: list[int], wanted: list[tuple[ResourceRequest, str]], num_gpus: int, cpus: float
) -> None:
    limit = DeviceAmounts(gpus=num_gpus, cpus=cpus)
    facts = Snapshot(
        nodes=tuple(node(f"n{number}", gpus=size, cpus=4.0) for number, size in enumerate(sizes)),
        holdings=(),
        candidates=tuple(
            candidate(number, request, project=project) for number, (request, project) in enumerate(wanted)
        ),
        projects=(ProjectInfo(name="a", parent="all"), ProjectInfo(name="all", limit=limit)),
    )
    result = plan(facts, Policy(), NOW)
    projects = {waiting.attempt_id: waiting.project for waiting in facts.candidates}
    tasks = [s for start in result.starts if projects[start.attempt_id] == "a" for s in start.allocation]
    assert sum(len(task.gpu_ids) * task.gpu_milli for task in tasks) <= num_gpus * 1000
    assert sum(task.cpus for task in tasks) <= cpus
    started = {start.attempt_id for start in result.starts}
    assert {explanation.attempt_id for explanation in result.explanations} == projects.keys() - started
