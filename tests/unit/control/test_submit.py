"""Accepting a job: what is checked, what is refused with which message, and what a repeated key does."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import select

from shoal.control.commands.job_records import ReferencedJob, resolve_reference
from shoal.control.job_specs import checkpoint_dir_on, spec_of
from shoal.errors import Denied, LimitReached, NotFound, SpecError, TooLarge
from shoal.identity import open_secrets
from shoal.model.attempt import AttemptState
from shoal.model.from_spec import request_of
from shoal.model.job import Job, JobOutcome
from shoal.scheduler import Policy
from shoal.scheduler.facts.policy import PriorityClass
from shoal.spec import parse_job
from shoal.store import KeyReused
from shoal.store.schema import idempotency_keys
from shoal.store.session import decode_job
from tests.support.planes.bench import (
    ANA,
    KEY,
    SPEC,
    USER,
    ControlPlaneLab,
    StagedEngine,
    result_in_loop,
    result_of,
)


def test_a_priority_by_name_is_the_number_of_its_class() -> None:
    lab = ControlPlaneLab()
    job = lab.submit(priority="production")
    assert (job.priority, spec_of(job).priority) == (50, "production")
    lab.core.planning.planner.policy = Policy(classes=(PriorityClass(name="rush", value=7),))
    assert lab.submit(priority="rush").priority == 7
    with pytest.raises(SpecError) as error:
        lab.submit(priority="rusch")
    assert error.value.message == "no priority class `rusch`; this cluster has `rush`"
    assert error.value.hint == "set `priority: rush`; a number from -1000 to 1000 is good too"


def test_a_class_above_what_the_project_allows_is_denied() -> None:
    lab = ControlPlaneLab()
    result_of(lab.plane.update_project(ANA, "lab", {"max_priority": 49}))
    with pytest.raises(Denied, match="`production` is priority 50, which is above 49"):
        lab.submit(priority="production")


def test_an_accepted_job_has_its_first_attempt_and_its_event_from_the_start() -> None:
    lab = ControlPlaneLab()
    job = lab.submit(name="train")
    assert (job.reference, job.name, job.owner_name) == ("lab/1", "train", "ana")
    assert lab.attempt(job).state is AttemptState.QUEUED
    (event,) = lab.events("job.submitted")
    assert (event.job_id, event.attempt_id, event.actor) == (
        job.job_id,
        lab.attempt(job).attempt_id,
        "user:ana",
    )


def test_a_job_without_a_name_is_called_by_its_number() -> None:
    assert ControlPlaneLab().submit().name == "job-1"


def test_an_array_without_a_name_has_one_name_and_answers_to_it() -> None:
    lab = ControlPlaneLab()
    lab.submit()
    result = lab.submit_all(array=3)
    assert {job.name for job in result.jobs} == {"job-2"}
    (named,) = lab.read(lambda tx: resolve_reference(tx, "job-2", ("lab",)))
    assert named.array_id == result.array_id


def test_missing_project_takes_no_jobs() -> None:
    lab = ControlPlaneLab()
    with pytest.raises(NotFound, match="no project `moon`"):
        result_of(lab.plane.submit(ANA, parse_job(SPEC), project="moon", owner=USER))


def test_the_last_job_of_a_quota_is_taken_and_the_next_is_not() -> None:
    lab = ControlPlaneLab(max_open_jobs=2)
    lab.submit()
    lab.submit()
    with pytest.raises(LimitReached, match="has 2 open jobs; 1 more would pass its limit of 2"):
        lab.submit()
    assert len(lab.events("job.submitted")) == 2


def test_an_array_is_taken_whole_or_not_at_all() -> None:
    lab = ControlPlaneLab(max_open_jobs=4)
    lab.submit()
    with pytest.raises(LimitReached, match="4 more would pass its limit of 4"):
        lab.submit_all(array=4)
    assert len(lab.submit_all(array=3).jobs) == 3


def test_an_ended_job_makes_room_in_the_quota() -> None:
    lab = ControlPlaneLab(max_open_jobs=1)
    lab.stop(lab.submit())
    assert lab.submit().number == 2


def test_the_elements_of_an_array_follow_each_other_in_number_and_index() -> None:
    lab = ControlPlaneLab()
    result = lab.submit_all(array={"indices": [3, 5, 9], "at_once": 2})
    places = [job.array for job in result.jobs]
    assert [job.number for job in result.jobs] == [1, 2, 3]
    assert [(p.index, p.size, p.at_once, p.array_id) for p in places if p] == [
        (3, 3, 2, result.array_id),
        (5, 3, 2, result.array_id),
        (9, 3, 2, result.array_id),
    ]
    assert lab.submit().number == 4


def test_the_elements_of_an_array_start_in_the_order_of_their_indices() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    jobs = lab.submit_all(array=16).jobs
    lab.run_loops()
    assert [lab.status(job) for job in jobs] == ["running"] * 8 + ["queued"] * 8


@pytest.mark.parametrize("written", ["{0.number}", "lab/{0.number}", "{0.name}", "{0.job_id}"])
def test_dependency_is_found_by_id_number_and_name(written: str) -> None:
    lab = ControlPlaneLab()
    first = lab.submit(name="prepare")
    job = lab.submit(after=[written.format(first)])
    assert [(dep.job_id, dep.label) for dep in job.after] == [(first.job_id, "lab/1 prepare")]


def test_a_name_means_the_newest_job_that_has_it() -> None:
    lab = ControlPlaneLab()
    lab.submit(name="prepare")
    newest = lab.submit(name="prepare")
    assert lab.submit(after=["prepare"]).after[0].job_id == newest.job_id


@pytest.mark.parametrize("written", ["7", "lab/7", "nobody", "job_0000", "moon/1"])
def test_dependency_on_a_missing_job_is_refused(written: str) -> None:
    lab = ControlPlaneLab()
    lab.submit()
    with pytest.raises(SpecError, match=f"`after` names `{written}`; project `lab` has no such job"):
        lab.submit(after=[written])


def test_a_job_that_is_named_in_several_ways_is_one_dependency() -> None:
    lab = ControlPlaneLab()
    array = lab.submit_all(name="fan", array=3)
    written = ["fan", "fan", array.array_id, "fan:ended", "1", array.jobs[0].job_id]
    job = lab.submit(after=written)
    ids = [job.job_id for job in array.jobs]
    assert [(dep.job_id, dep.on) for dep in job.after] == [
        *((job_id, "succeeded") for job_id in ids),
        *((job_id, "ended") for job_id in ids),
    ]


def test_too_many_dependencies_are_refused_before_an_element_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = ControlPlaneLab()
    lab.submit_all(name="fan", array=4)
    lab.submit_all(name="other", array=4)
    monkeypatch.setattr("shoal.control.commands.submit.MAX_DEPENDENCIES", 5)
    assert len(lab.submit(after=["fan", "6"]).after) == 5
    monkeypatch.setattr("shoal.control.commands.submit.elements_of", None)
    with pytest.raises(SpecError, match="would wait for 8 jobs; `after` may stand for 5 at most"):
        lab.submit(after=["fan", "other"])


def test_a_job_of_another_project_is_no_dependency_even_by_its_id() -> None:
    lab = ControlPlaneLab()
    result_in_loop(lab.plane.create_project(ANA, "moon", {}))
    theirs = result_of(lab.plane.submit(ANA, parse_job(SPEC), project="moon", owner=USER)).jobs[0]
    for written in (theirs.job_id, "moon/1"):
        with pytest.raises(SpecError, match="project `lab` has no such job"):
            lab.submit(after=[written])


def test_a_dependency_that_already_failed_ends_the_job_and_says_which() -> None:
    lab = ControlPlaneLab()
    first = lab.submit(name="prepare")
    lab.stop(first)
    job = lab.submit(after=["prepare"])
    lab.run_loops()
    ended = lab.stored_job(job)
    assert ended.outcome is JobOutcome.CANCELLED
    assert ended.because == "lab/1 prepare was cancelled; this job was to start only after it succeeded"
    assert lab.attempt(job).message == ended.because


def test_only_directories_below_an_opened_root_may_be_mounted(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    root = tmp_path_factory.mktemp("data")
    lab = ControlPlaneLab(mount_roots=(root,))
    lab.submit(mounts=[f"{root}:/data", f"{root}/sets/a:/more:ro"])
    for source in ("/etc", f"{root}-other", str(root.parent)):
        with pytest.raises(Denied, match="is not allowed here; allowed: "):
            lab.submit(mounts=[f"{source}:/data"])


def test_without_an_opened_root_nothing_may_be_mounted() -> None:
    with pytest.raises(Denied, match="mounting `/srv` is not allowed here; allowed: nothing"):
        ControlPlaneLab().submit(mounts=["/srv:/data"])


def test_a_named_secret_needs_a_value() -> None:
    with pytest.raises(SpecError, match="no value was sent for the secrets: TOKEN") as refused:
        submit_naming_a_secret()
    assert refused.value.hint == "export TOKEN=... before `shoal run`"


def submit_naming_a_secret(**sent: str) -> tuple[ControlPlaneLab, str]:
    lab = ControlPlaneLab()
    spec = parse_job({**SPEC, "secrets": ["TOKEN"]})
    result = result_of(lab.plane.submit(ANA, spec, project="lab", owner=USER, secrets=sent))
    return lab, result.jobs[0].job_id


def test_unnamed_secret_is_refused_without_showing_its_value() -> None:
    with pytest.raises(SpecError, match="secrets not named in the spec: OTHER") as refused:
        submit_naming_a_secret(TOKEN="a", OTHER="hunter2")
    assert "hunter2" not in str(refused.value)


def test_a_secret_is_sealed_for_its_job_and_in_no_event() -> None:
    lab, job_id = submit_naming_a_secret(TOKEN="hunter2")
    sealed = lab.read(lambda tx: tx.secrets.get(job_id))
    assert sealed is not None
    assert b"hunter2" not in sealed
    assert open_secrets(KEY, job_id, sealed) == {"TOKEN": "hunter2"}
    assert "hunter2" not in repr(lab.events())


def test_a_guessed_secret_cannot_be_checked_against_the_key_table() -> None:
    """The fingerprint of a request is in the database, so it must not be computable from guesses."""
    seen = set()
    stored = select(idempotency_keys.c.fingerprint)
    for key in (KEY, bytes(32)):
        lab = ControlPlaneLab()
        lab.restart(key)
        spec = parse_job({**SPEC, "secrets": ["PIN"]})
        result_of(lab.plane.submit(ANA, spec, project="lab", owner=USER, key="k", secrets={"PIN": "1234"}))
        seen.add(lab.read(lambda tx: tx.session.value(stored)))
    assert len(seen) == 2


def test_undeclared_queue_is_refused_with_the_nearest_one() -> None:
    lab = ControlPlaneLab(queues=("default", "night"))
    with pytest.raises(SpecError, match="no queue `nigth`; this cluster has `default`, `night`") as refused:
        lab.submit(queue="nigth")
    assert refused.value.hint is not None
    assert refused.value.hint.startswith("set `queue: night`, or ")
    assert lab.submit(queue="night").queue == "night"


def test_job_that_no_node_could_ever_hold_is_refused_with_the_limit() -> None:
    lab = ControlPlaneLab()
    lab.run_loops()
    with pytest.raises(SpecError, match=r"job `big` asks for 16 GPUs on one node; .* has 4"):
        lab.submit(name="big", resources={"gpus": 16})
    with pytest.raises(SpecError, match="the job asks for 3 nodes"):
        lab.submit(resources={"nodes": 3})
    assert lab.events("job.submitted") == []


def test_job_that_only_has_to_wait_is_accepted() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    lab.running_job(resources={"gpus": 4})
    assert lab.submit(resources={"gpus": 4}).is_open


def test_before_any_node_is_known_nothing_is_refused_for_its_size() -> None:
    assert ControlPlaneLab().submit(resources={"gpus": 64}).is_open


def test_a_repeated_key_gives_the_first_answer_and_changes_nothing() -> None:
    lab = ControlPlaneLab()
    first = lab.submit_all(key="k", array=3)
    again = lab.submit_all(key="k", array=3)
    assert not first.was_repeated
    assert again == msgspec.structs.replace(first, was_repeated=True)
    assert len(lab.events("job.submitted")) == 3


def test_a_repeated_key_tells_how_the_job_is_now() -> None:
    lab = ControlPlaneLab()
    lab.stop(lab.submit(key="k"))
    assert lab.submit(key="k").outcome is JobOutcome.CANCELLED


@pytest.mark.parametrize(
    "other", [{"run": "evaluate"}, {"secrets": {}, "name": "x"}, {"resources": {"cpus": 2}}]
)
def test_a_key_is_good_for_one_request(other: dict[str, object]) -> None:
    lab = ControlPlaneLab()
    lab.submit(key="k")
    with pytest.raises(KeyReused, match="`k` was used before for a different request"):
        lab.submit(key="k", **other)
    assert len(lab.events("job.submitted")) == 1


def test_the_same_spec_with_another_secret_is_another_request() -> None:
    lab = ControlPlaneLab()
    spec = parse_job({**SPEC, "secrets": ["TOKEN"]})
    for value in ("a", "a"):
        result_of(lab.plane.submit(ANA, spec, project="lab", owner=USER, key="k", secrets={"TOKEN": value}))
    with pytest.raises(KeyReused):
        result_of(lab.plane.submit(ANA, spec, project="lab", owner=USER, key="k", secrets={"TOKEN": "b"}))


def test_request_that_an_upgrade_parses_differently_is_still_the_same_request() -> None:
    """A new version may have other defaults, or know names that an old one left out."""
    lab = ControlPlaneLab()
    before, after = parse_job(SPEC), parse_job({**SPEC, "fence": "11m"})
    body = b'{"spec":{"run":"train"}}'
    results = [
        result_of(lab.plane.submit(ANA, spec, project="lab", owner=USER, key="k", raw_request=body))
        for spec in (before, after)
    ]
    assert [result.was_repeated for result in results] == [False, True]
    with pytest.raises(KeyReused):
        result_of(lab.plane.submit(ANA, before, project="lab", owner=USER, key="k", raw_request=b"{}"))


def test_idempotency_key_belongs_to_its_actor() -> None:
    lab = ControlPlaneLab()
    first = lab.submit(key="k")
    ben = msgspec.structs.replace(ANA, id="usr_ben", name="ben")
    theirs = result_of(lab.plane.submit(ben, parse_job(SPEC), project="lab", owner=USER, key="k"))
    assert theirs.jobs[0].job_id != first.job_id


def test_a_refused_request_does_not_use_its_key_up() -> None:
    lab = ControlPlaneLab(max_open_jobs=1)
    first = lab.submit()
    with pytest.raises(LimitReached):
        lab.submit(key="k")
    lab.stop(first)
    assert not lab.submit_all(key="k").was_repeated


def test_repeated_key_is_answered_although_the_job_would_now_be_refused() -> None:
    lab = ControlPlaneLab()
    first = lab.submit_all(key="k", resources={"gpus": 16})
    lab.run_loops()
    again = lab.submit_all(key="k", resources={"gpus": 16})
    assert again.was_repeated
    assert again.jobs == first.jobs


def test_a_job_whose_name_looks_like_an_id_is_still_found_by_its_number() -> None:
    lab = ControlPlaneLab()
    job = lab.submit(name="job_mine")
    assert lab.read(lambda tx: resolve_reference(tx, "1", ("lab",))) == [ReferencedJob(job)]
    assert lab.read(lambda tx: resolve_reference(tx, "1", ("moon",))) == []


def test_an_element_of_an_array_is_named_by_its_index() -> None:
    lab = ControlPlaneLab()
    lab.submit(name="lone")
    older = lab.submit_all(name="sweep", array={"indices": [3, 5, 9]})
    newer = lab.submit_all(name="sweep", array=4)
    expected = {
        "sweep[2]": [ReferencedJob(newer.jobs[2])],
        "lab/sweep[0]": [ReferencedJob(newer.jobs[0])],
        f"{older.array_id}[9]": [ReferencedJob(older.jobs[2])],
        f"{older.array_id}[4]": [],
        "sweep[4]": [],
        "lone[0]": [],
        "sweep[-1]": [],
    }
    resolved = lab.read(
        lambda tx: {reference: resolve_reference(tx, reference, ("lab",)) for reference in expected}
    )
    assert resolved == expected


def test_an_element_is_found_by_its_index_without_reading_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = ControlPlaneLab()
    indices = [3 * number + 5 for number in range(200)]
    array = lab.submit_all(name="sweep", array={"indices": indices})
    num_read = 0

    def count(body: str) -> Job:
        nonlocal num_read
        num_read += 1
        return decode_job(body)

    def find(index: int) -> list[ReferencedJob]:
        return lab.read(lambda tx: resolve_reference(tx, f"sweep[{index}]", ("lab",)))

    monkeypatch.setattr("shoal.store.tables.jobs.decode_job", count)
    for place in (0, 1, 117, 199):
        (named,) = find(indices[place])
        assert named.job.number == array.jobs[0].number + place
    for missing in (0, 4, 6, 601, 603, 99_999):
        assert find(missing) == []
    assert num_read < 10 * 15


@pytest.mark.parametrize("reference", ["sweep", "the array's id"])
def test_after_an_array_means_after_every_element(reference: str) -> None:
    lab = ControlPlaneLab()
    array = lab.submit_all(name="sweep", array=4)
    reference = str(array.array_id) if reference == "the array's id" else reference
    job = lab.submit(after=[reference])
    assert [dependency.job_id for dependency in job.after] == [element.job_id for element in array.jobs]


def test_after_an_element_of_an_array_means_that_one() -> None:
    lab = ControlPlaneLab()
    array = lab.submit_all(name="sweep", array=4)
    job = lab.submit(after=["2"])
    assert [dependency.job_id for dependency in job.after] == [array.jobs[1].job_id]


def test_a_name_means_an_array_only_while_that_is_its_newest_job() -> None:
    lab = ControlPlaneLab()
    array = lab.submit_all(name="sweep", array=2)
    (named,) = lab.read(lambda tx: resolve_reference(tx, "sweep", ("lab",)))
    assert named == ReferencedJob(array.jobs[-1], array.array_id)
    alone = lab.submit(name="sweep")
    assert lab.read(lambda tx: resolve_reference(tx, "sweep", ("lab",))) == [ReferencedJob(alone)]


def test_an_array_of_a_spec_too_large_to_repeat_is_refused() -> None:
    lab = ControlPlaneLab()
    script = "#" * 100_000
    with pytest.raises(TooLarge, match=r"1000 jobs of 100.* at most 67108864"):
        lab.submit(run=script, array=1000)
    assert lab.events("job.") == []
    assert len(lab.submit_all(run=script, array=3).jobs) == 3


def test_the_spec_of_an_array_is_in_the_log_once() -> None:
    lab = ControlPlaneLab()
    lab.submit_all(array=3)
    assert ["spec" in event.data for event in lab.events("job.submitted")] == [True, False, False]


class InParts(StagedEngine):
    """A cluster whose nodes are in two pools."""

    def common_label(self, require: Mapping[str, str], pools: Collection[str]) -> str | None:
        return None if "pool" in require else "pool"


@pytest.mark.parametrize(
    ("fields", "within"),
    [
        ({"resources": {"nodes": 2}}, "pool"),
        ({"resources": {"nodes": "1..2"}}, "pool"),
        ({"resources": {"nodes": 2}, "topology": "spread:rack"}, "pool"),
        ({"resources": {"nodes": 2}, "topology": "rack:preferred"}, "pool"),
        ({"resources": {"nodes": 2}, "topology": "rack"}, "rack"),
        ({"resources": {"nodes": 2}, "topology": "spread:pool"}, None),
        ({"resources": {"nodes": 2, "require": {"pool": "default"}}}, None),
        ({"resources": {"nodes": 1}}, None),
    ],
)
def test_a_gang_stays_in_one_part_of_the_cluster_unless_it_requires_something_else(
    fields: dict[str, object], within: str | None
) -> None:
    lab = ControlPlaneLab()
    lab.core.link.engine = InParts(lab.cluster)
    job = lab.submit(**fields)
    assert (job.request.topology.within if job.request.topology else None) == within
    assert request_of(spec_of(job)) == job.request  # so that decisions can be made again from the log


class OnOtherDisks(StagedEngine):
    """A cluster whose nodes have checkpoints below `shared`; None: they share no directory."""

    shared: str | None = None
    sharing_hint = "`shoal connect slurm --shared DIR`"

    def checkpoint_dir(self, job_id: str) -> str | None:
        return f"{self.shared}/{job_id}" if self.shared else None


def test_checkpoints_that_the_next_attempt_would_not_find_are_refused_at_submit() -> None:
    lab = ControlPlaneLab()
    lab.core.link.engine = engine = OnOtherDisks(lab.cluster)
    with pytest.raises(
        SpecError, match="job `big` keeps checkpoints, and this cluster has no dir"
    ) as refused:
        lab.submit(name="big", checkpoint={})
    assert refused.value.hint is not None
    assert refused.value.hint.endswith("let an operator type `shoal connect slurm --shared DIR`")
    assert lab.events("job.") == []
    lab.submit()
    engine.shared = "/scratch"
    kept = lab.submit(checkpoint={})
    assert checkpoint_dir_on(engine, kept, Path("/home")) == f"/scratch/{kept.job_id}"
    assert checkpoint_dir_on(engine, lab.submit(), Path("/home")) is None
    ran = msgspec.structs.replace(lab.attempt(kept), native_id="slurm:att_1")
    assert checkpoint_dir_on(engine, kept, Path("/home"), [ran]) is None
    again = msgspec.structs.replace(ran, native_id=f"{engine.name}:att_2")
    assert checkpoint_dir_on(engine, kept, Path("/home"), [ran, again]) == f"/scratch/{kept.job_id}"
    assert (
        checkpoint_dir_on(StagedEngine(lab.cluster), kept, Path("/home"))
        == f"/home/checkpoints/{kept.job_id}"
    )
    lab.stop(kept)
    engine.shared = None  # connected again without it
    with pytest.raises(SpecError, match="keeps checkpoints, and this cluster has no directory"):
        lab.retry(kept)


def test_one_folder_for_all_nodes_is_refused_where_nodes_share_no_directory() -> None:
    lab = ControlPlaneLab()
    lab.core.link.engine = engine = OnOtherDisks(lab.cluster)
    with pytest.raises(SpecError, match="`big` asks for one working folder on all nodes, and") as refused:
        lab.submit(name="big", shared=True)
    assert refused.value.hint is not None
    assert refused.value.hint.startswith("leave out `shared`")
    engine.shared = "/scratch"
    kept = lab.submit(shared=True)
    assert checkpoint_dir_on(engine, kept, Path("/home")) == f"/scratch/{kept.job_id}"


@pytest.mark.parametrize(
    ("ranks", "cpus", "is_taken"),
    [
        (1024, 0.1, False),
        (11, 0.1, False),
        (10, 0.1, True),
        (29, 0.29, True),
        (1, 0.01, True),
        (1024, 10.24, True),
    ],
)
def test_ranks_are_bounded_by_the_cpus_they_share(ranks: int, cpus: float, is_taken: bool) -> None:
    lab = ControlPlaneLab()
    fields = {"ranks_per_node": ranks, "resources": {"cpus": cpus}}
    if is_taken:
        assert lab.submit(**fields).request.ranks_per_node == ranks
        return
    with pytest.raises(
        SpecError, match=rf"{ranks} ranks on each node .* at most 100 ranks share a CPU"
    ) as refused:
        lab.submit(**fields)
    assert (
        refused.value.hint
        == f"set `cpus: {ranks / 100:g}` or more in `resources`, or `ranks_per_node: 10` or less"
    )


def test_ranks_that_a_launcher_in_the_script_asks_for_are_bounded_too() -> None:
    with pytest.raises(SpecError, match="at most 100 ranks share a CPU"):
        ControlPlaneLab().submit(run="torchrun --nproc-per-node 512 train.py", resources={"cpus": 0.5})
