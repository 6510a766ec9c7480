"""Jobs over HTTP: accepted once, listed in pages, addressed by what people type, explained."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator

import pytest
from pydantic import TypeAdapter

from shoal.api.views import cluster, schema
from shoal.model.attempt import AttemptState
from shoal.store import Tx
from shoal.wire import LeftBehind
from tests.support.archives import tar_of
from tests.support.planes.asgi import AsgiReply
from tests.support.planes.world import ApiWorld, eventually, open_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiWorld]:
    with open_world(tmp_path_factory.mktemp("jobs")) as opened:
        yield opened


def test_a_key_sent_twice_is_one_job_and_the_second_answer_says_so(world: ApiWorld) -> None:
    body = {"spec": {"run": "true"}, "project": "vision"}
    key = [("idempotency-key", "k-1")]
    first = world.call("POST", "/v1/jobs", role="member", data=body, headers=key).json()
    second = world.call("POST", "/v1/jobs", role="member", data=body, headers=key).json()
    assert (first["was_repeated"], second["was_repeated"]) == (False, True)
    assert first["jobs"][0]["job_id"] == second["jobs"][0]["job_id"]
    other = world.call(
        "POST", "/v1/jobs", role="member", data={"spec": {"run": "false"}, "project": "vision"}, headers=key
    )
    assert (other.status, other.json()["code"]) == (409, "idempotency.mismatch")
    mine = world.call("POST", "/v1/jobs", role="other", data=body, headers=key).json()
    assert not mine["was_repeated"]


def test_a_repeated_key_is_answered_though_the_project_and_the_archive_have_changed(world: ApiWorld) -> None:
    raw = tar_of({"again.py": b"print('again')\n"})
    digest = hashlib.sha256(raw).hexdigest()
    typed = [("content-type", "application/x-tar")]
    target = f"/v1/archives/{digest}?project=vision"
    assert world.call("PUT", target, role="member", body=raw, headers=typed).status == 200
    body = {"spec": {"run": "true", "priority": 7}, "project": "vision", "archive": digest}

    def submit(key: str) -> AsgiReply:
        return world.call("POST", "/v1/jobs", role="member", data=body, headers=[("idempotency-key", key)])

    def allow(priority: int) -> None:
        limits = {"max_priority": priority}
        assert world.call("PATCH", "/v1/projects/vision", role="admin", data=limits).status == 200

    first = submit("k-7")
    allow(5)
    assert submit("k-8").status == 403
    assert submit("k-7").json()["was_repeated"]
    allow(100)
    (world.plane.settings.home / "archives" / f"{digest}.tar").unlink()
    assert submit("k-9").json()["code"] == "archive.missing"
    assert submit("k-7").json()["jobs"][0]["job_id"] == first.json()["jobs"][0]["job_id"]


def test_the_order_of_a_body_and_its_white_space_are_not_part_of_a_request(world: ApiWorld) -> None:
    key = [("idempotency-key", "k-4"), ("content-type", "application/json")]
    bodies = (
        b'{"project": "vision", "spec": {"run": "a", "name": "b"}}',
        b'{"spec":{"name":"b","run":"a"},"project":"vision"}',
        b'{"spec":{"name":"b","run":"a","fence":"30m"},"project":"vision"}',
    )
    answers = [world.call("POST", "/v1/jobs", role="member", body=body, headers=key) for body in bodies]
    assert [one.status for one in answers] == [201, 201, 409]
    assert answers[1].json()["was_repeated"]


@pytest.mark.parametrize("key", ["", "x" * 201, "a b", "é"])
def test_a_malformed_key_is_refused(world: ApiWorld, key: str) -> None:
    body = {"spec": {"run": "true"}, "project": "vision"}
    assert (
        world.call("POST", "/v1/jobs", role="member", data=body, headers=[("idempotency-key", key)]).status
        == 422
    )


@pytest.mark.parametrize("path", ["/v1/jobs?project=", "/v1/events?project="])
def test_a_project_that_is_not_there_is_answered_as_one_that_may_not_be_seen(
    world: ApiWorld, path: str
) -> None:
    problems = [
        world.call("GET", path + name, role=role).json()
        for name, role in (("moon", "admin"), ("moon", "member"), ("speech", "member"))
    ]
    assert {(item["status"], item["detail"], item.get("hint")) for item in problems} == {
        (404, "no such thing, or one you may not see", None)
    }
    assert world.call("GET", path + "speech", role="admin").status == 200


def test_a_repeated_submission_tells_where_the_job_is_now(world: ApiWorld) -> None:
    body = {"spec": {"run": "sleep 9"}, "project": "vision"}
    key = [("idempotency-key", "k-2")]
    job_id = world.call("POST", "/v1/jobs", role="member", data=body, headers=key).json()["jobs"][0]["job_id"]
    world.until_state(job_id, AttemptState.RUNNING)
    again = world.call("POST", "/v1/jobs", role="member", data=body, headers=key).json()
    assert again["jobs"][0]["status"] == "running"


def test_the_only_project_one_may_submit_to_need_not_be_named(world: ApiWorld) -> None:
    assert world.call("POST", "/v1/jobs", role="member", data={"spec": {"run": "true"}}).status == 201
    unclear = world.call("POST", "/v1/jobs", role="admin", data={"spec": {"run": "true"}})
    assert (unclear.status, "which project" in unclear.json()["detail"]) == (422, True)
    two = {"spec": {"run": "true", "project": "speech"}, "project": "vision"}
    assert world.call("POST", "/v1/jobs", role="admin", data=two).status == 422


def test_all_mistakes_of_a_spec_are_reported_with_the_nearest_name(world: ApiWorld) -> None:
    spec = {"resources": {"gpu": 1}, "piority": 3}
    refused = world.call("POST", "/v1/jobs", role="member", data={"spec": spec, "project": "vision"}).json()
    problems = "\n".join(refused["problems"])
    assert all(word in problems for word in ("gpus", "priority", "run"))


def test_flags_are_the_job_that_the_same_spec_is(world: ApiWorld) -> None:
    flags = {"run": "true", "name": "f", "cpus": "0.5", "nodes": "1", "env": ["A=1", "B=x=y"], "retry": "2"}
    spec = {"run": "true", "name": "f", "resources": {"cpus": 0.5, "nodes": 1}, "retry": 2}
    spec["env"] = {"A": "1", "B": "x=y"}
    shown = []
    for body in ({"flags": flags}, {"spec": spec}):
        made = world.call("POST", "/v1/jobs", role="member", data=body)
        assert made.status == 201, made.body
        job_id = made.json()["jobs"][0]["job_id"]
        shown.append(world.call("GET", f"/v1/jobs/{job_id}", role="member").json()["spec"])
    assert shown[0] == shown[1]
    assert shown[0]["env"] == spec["env"]


def test_all_mistakes_in_flags_are_named_as_they_were_typed(world: ApiWorld) -> None:
    flags = {"run": "true", "cpus": "0", "time_limit": "soon", "gpu": "1", "env": ["A"], "mounts": "x"}
    refused = world.call("POST", "/v1/jobs", role="member", data={"flags": flags})
    assert (refused.status, refused.json()["code"]) == (422, "spec.invalid")
    problems = "\n".join(refused.json()["problems"])
    names = ("`--cpus`", "`--time-limit`", "`--gpus`", "`--env`", "`--mount`")
    assert all(name in problems for name in names)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"spec": {"run": "true"}, "flags": {"run": "true"}},
        {"spec": None, "flags": None},
        {"flags": {}},
        {"flags": {"run": 1}},
        {"flags": {"run": None}},
        {"flags": {"run": "true", "env": {"A": "1"}}},
        {"flags": ["run"]},
        {"flags": {"run": "true", "self": "x"}},
    ],
)
def test_a_job_is_a_spec_or_flags_of_text(world: ApiWorld, body: object) -> None:
    assert world.call("POST", "/v1/jobs", role="member", data=body).status == 422


def test_missing_snapshot_is_reported_by_its_code(world: ApiWorld) -> None:
    raw = tar_of({"train.py": b"print('hi')\n"})
    digest = hashlib.sha256(raw).hexdigest()
    body = {"flags": {"run": "python train.py"}, "archive": digest}
    refused = world.call("POST", "/v1/jobs", role="member", data=body)
    assert (refused.status, refused.json()["code"]) == (422, "archive.missing")
    typed = [("content-type", "application/x-tar")]
    target = f"/v1/archives/{digest}"
    assert world.call("PUT", target, role="admin", body=raw, headers=typed).status == 422
    assert world.call("PUT", target, role="viewer", body=raw, headers=typed).status in (403, 422)
    assert world.call("PUT", target, role="member", body=raw, headers=typed).status == 200
    assert world.call("POST", "/v1/jobs", role="member", data=body).status == 201


def test_pages_show_every_job_once_newest_first(world: ApiWorld) -> None:
    made = [world.submit("member", "vision", name="paged") for _ in range(7)]
    seen: list[str] = []
    cursor = ""
    for _ in range(10):
        page = world.call("GET", f"/v1/jobs?name=paged&limit=3{cursor}", role="viewer").json()
        seen += [job["job_id"] for job in page["items"]]
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert seen == made[::-1]


def test_number_reference_name_or_id_finds_the_job(world: ApiWorld) -> None:
    job_id = world.submit("member", "vision", name="findme")
    job = world.call("GET", f"/v1/jobs/{job_id}", role="member").json()
    for ref in (job["ref"].replace("/", "%2F"), str(job["number"]), job_id, "findme"):
        items = world.call("GET", f"/v1/jobs?ref={ref}", role="member").json()["items"]
        assert [item["job_id"] for item in items] == [job_id], ref
        assert world.call("GET", f"/v1/jobs?ref={ref}", role="stranger").json()["items"] in (
            [],
            [item for item in [_numbered(world, job["number"])] if item],
        )


def _numbered(world: ApiWorld, number: int) -> object:
    items = world.call("GET", f"/v1/jobs?ref=speech%2F{number}", role="stranger").json()["items"]
    return items[0] if items else None


def test_filters_choose_by_status_owner_and_array(world: ApiWorld) -> None:
    body = {"spec": {"run": "sleep 9", "array": 3}, "project": "vision"}
    made = world.call("POST", "/v1/jobs", role="other", data=body).json()
    assert (made["count"], len(made["jobs"])) == (3, 3)
    mine = world.call("GET", f"/v1/jobs?array={made['array_id']}&owner=bea", role="viewer").json()["items"]
    assert {job["array"]["index"] for job in mine} == {0, 1, 2}
    nobody = world.call("GET", f"/v1/jobs?array={made['array_id']}&owner=nobody", role="viewer").json()[
        "items"
    ]
    assert nobody == []
    stopped = world.call("POST", f"/v1/arrays/{made['array_id']}/stop", role="other", data={}).json()
    assert stopped["count"] == 3
    assert {job["status"] for job in stopped["jobs"]} <= {"stopping", "cancelled"}


def test_several_statuses_may_be_asked_for_together(world: ApiWorld) -> None:
    job_id = world.submit("member", "vision", name="both", after=[world.jobs["vision"]])
    items = world.call("GET", "/v1/jobs?name=both&status=running&status=queued", role="viewer").json()[
        "items"
    ]
    assert [job["job_id"] for job in items] == [job_id]
    assert world.call("GET", "/v1/jobs?name=both&status=running", role="viewer").json()["items"] == []
    assert world.call("GET", "/v1/jobs?status=asleep", role="viewer").status == 422


def test_a_job_that_cannot_start_yet_is_explained(world: ApiWorld) -> None:
    first = world.submit("member", "vision")
    waiting = world.submit("member", "vision", after=[first])
    explanation = world.call("GET", f"/v1/jobs/{waiting}/why", role="viewer").json()
    assert (explanation["status"], bool(explanation["sentence"])) == ("queued", True)


def test_a_waiting_job_has_an_outlook_where_it_is_asked_for(world: ApiWorld) -> None:
    world.submit("member", "vision", resources={"gpus": 3, "nodes": 2}, time_limit="1h")
    waiting = world.submit("member", "vision", resources={"gpus": 3, "nodes": 2})
    eventually(lambda: bool(world.plane.core.planning.planner.promises))
    plain = world.call("GET", f"/v1/jobs/{waiting}/why", role="viewer").json()
    assert "outlook" not in plain
    explanation = world.call("GET", f"/v1/jobs/{waiting}/why?predict=true", role="viewer").json()
    checked: object = TypeAdapter(schema.WhyView).validate_python(explanation)
    assert checked == explanation
    assert explanation["outlook"]["basis"] == "scenarios"
    assert explanation["outlook"]["coverage"] == 0.9
    page = world.call("GET", "/v1/jobs?predict=true", role="viewer").json()
    by_id = {job["job_id"]: job["outlook"] for job in page["items"]}
    assert by_id[waiting]["latest"] > time.time()
    assert by_id[world.jobs["vision"]] is None


def test_a_job_that_can_never_fit_is_refused_at_submit(world: ApiWorld) -> None:
    spec = {"run": "true", "resources": {"gpus": 64}}
    refused = world.call("POST", "/v1/jobs", role="member", data={"spec": spec, "project": "vision"})
    assert refused.status == 422
    assert "64" in refused.json()["detail"]


def test_a_stopped_job_can_be_retried_and_an_open_one_cannot(world: ApiWorld) -> None:
    job_id = world.submit("member", "vision")
    assert world.call("POST", f"/v1/jobs/{job_id}/retry", role="member", data={}).status == 409
    world.call("POST", f"/v1/jobs/{job_id}/stop", role="member")
    eventually(lambda: world.call("GET", f"/v1/jobs/{job_id}", role="member").json()["status"] == "cancelled")
    again = world.call("POST", f"/v1/jobs/{job_id}/retry", role="member", data={})
    assert (again.status, again.json()["epoch"]) == (200, 2)


def test_what_a_route_answers_is_what_its_description_says(world: ApiWorld) -> None:
    job = world.jobs["vision"]
    for path, view in {
        f"/v1/jobs/{job}": schema.JobDetailView,
        f"/v1/jobs/{job}/why": schema.WhyView,
        f"/v1/jobs/{job}/logs": schema.LogPageView,
        "/v1/jobs": schema.JobPageView,
        "/v1/nodes": schema.NodePageView,
        "/v1/status": cluster.StatusView,
        "/v1/me": schema.MeView,
        "/v1/events": schema.EventPageView,
        "/v1/projects": schema.ProjectPageView,
        "/v1/projects/vision/members": schema.MemberPageView,
        "/v1/tokens": schema.TokenPageView,
        "/v1/users": schema.UserPageView,
        "/v1/audit/verify": cluster.VerifyView,
    }.items():
        body = world.call("GET", path, role="admin").json()
        checked: object = TypeAdapter(view).validate_python(body)
        assert checked == body, path


def test_names_of_left_behind_files_reach_the_supervisor_and_are_not_part_of_the_request(
    world: ApiWorld,
) -> None:
    key = [("idempotency-key", "k-left")]

    def submit(*ignored: str) -> AsgiReply:
        data = {"spec": {"run": "true"}, "project": "vision", "left_behind": {"ignored": list(ignored)}}
        return world.call("POST", "/v1/jobs", role="member", data=data, headers=key)

    made = submit("data/a.bin").json()
    assert submit("data/a.bin", "data/b.bin").json()["was_repeated"]

    def kept(tx: Tx) -> LeftBehind | None:
        job = tx.jobs.get(made["jobs"][0]["job_id"])
        return tx.left_behind.get(job.left_behind) if job and job.left_behind else None

    assert world.read(kept) == LeftBehind(ignored=("data/a.bin",))


@pytest.mark.parametrize(
    "left_behind",
    [
        {"ignored": ["x" * 4000] * 20},
        {"ignored": [""]},
        {"ignored": ["x"] * 3000},
        {"folder": 5},
        {"more": []},
    ],
)
def test_malformed_or_too_long_list_of_files_is_refused(
    world: ApiWorld, left_behind: dict[str, object]
) -> None:
    data = {"spec": {"run": "true"}, "project": "vision", "left_behind": left_behind}
    assert world.call("POST", "/v1/jobs", role="member", data=data).status == 422
