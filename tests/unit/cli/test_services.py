"""`shoal serve`, `services`, `scale` and service events: requests, output and exit codes."""

from __future__ import annotations

import inspect
import re
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from shoal.cli import services
from shoal.spec.service import ServiceSpec
from shoal.spec.service_fields import SERVICE_FIELD_MODELS
from tests.support.fakes.api_server import FakeApiServer, Shell, job_view, log_line

URL = "http://127.0.0.1:7463/vision/chat/"
SHOWN = "/v1/services/svc_1"
FILE = "kind: service\nname: chat\nrun: serve\nworkdir: null\n"


def view(**more: Any) -> dict[str, Any]:
    return {
        "id": "svc_1", "ref": "vision/chat", "project": "vision", "name": "chat", "path": "/vision/chat/",
        "url": URL, "release": 1, "newest_release": 1, "rollout": None, "ready": 0, "replicas": 1,
        "min_replicas": 1, "max_replicas": 1, "is_stopping": False, "created_at": 0.0, "servers": [], **more,
    }  # fmt: skip


def rollout(stage: str, because: str = "") -> dict[str, Any]:
    return {"old": 1, "new": 2, "stage": stage, "step": 0, "share": None, "because": because, "waits": ""}


def answer_job(fake: FakeApiServer, **more: Any) -> str:
    """Set the replies for `vision/3` and return its path."""
    job = job_view(3, "failed", **{"replica": None, **more})
    path = f"/v1/jobs/{job['job_id']}"
    fake.answers["GET", "/v1/jobs"] = {"items": [job], "next": None}
    fake.answers["GET", path] = job
    return path


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "POLL_S", 0.001)


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "chat.yaml").write_text(FILE)
    return "chat.yaml"


@pytest.fixture
def _starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command finds no server and starts a fake one."""
    monkeypatch.setattr("shoal.cli.services.is_served", lambda: False)
    monkeypatch.setattr("shoal.cli.services.start_server", lambda: None)


def test_serve_does_not_wait_for_the_address_on_a_server_that_was_there(
    shell: Shell, fake: FakeApiServer, file: str
) -> None:
    fake.answers["POST", "/v1/services"] = 201, view(url=None)
    assert shell("serve", file).out == "vision/chat: release 1, at /vision/chat/\n"
    assert [seen.method for seen in fake.requests if seen.path == SHOWN] == []


def test_serve_takes_a_project_instead_of_the_files_own(shell: Shell, fake: FakeApiServer, file: str) -> None:
    fake.answers["POST", "/v1/services"] = 201, view(url=None)
    assert shell("serve", file, "-p", "lang").code == 0
    assert fake.requests[-1].json()["spec"]["project"] == "lang"


@pytest.mark.usefixtures("_starts")
def test_serve_succeeds_without_knowing_the_address(shell: Shell, fake: FakeApiServer, file: str) -> None:
    fake.answers["POST", "/v1/services"] = 201, view(url=None)
    fake.answers["GET", SHOWN] = (
        404,
        {"title": "Not Found", "status": 404, "code": "not_found", "detail": "gone"},
    )
    result = shell("serve", file)
    assert (result.code, result.out) == (0, "vision/chat: release 1, at /vision/chat/\n")
    assert "the service runs, but its address is not known: gone" in result.err


@pytest.mark.usefixtures("_starts")
def test_first_serve_waits_for_the_address_and_says_how_to_call_it(
    shell: Shell, fake: FakeApiServer, file: str
) -> None:
    fake.answers["POST", "/v1/services"] = 201, view(url=None)
    fake.answers["GET", SHOWN] = [view(url=None), view()]
    result = shell("serve", file)
    assert result.out == f"vision/chat: release 1, at {URL}\n"
    assert result.err.splitlines()[1:] == [
        "     TOKEN=$(shoal token create --project vision --service chat)",
        f'     curl -sS -H "Authorization: Bearer $TOKEN" {URL}',
    ]


def test_public_service_is_called_without_a_token(shell: Shell, fake: FakeApiServer, tmp_path: Path) -> None:
    (tmp_path / "open.yaml").write_text(FILE + "public: true\n")
    fake.answers["POST", "/v1/services"] = 201, view()
    assert shell("serve", "open.yaml").err.splitlines()[1:] == [f"     curl -sS {URL}"]


def test_service_is_called_where_it_is_known_to_answer(
    shell: Shell, fake: FakeApiServer, tmp_path: Path
) -> None:
    fake.answers["POST", "/v1/services"] = 201, view()
    for path, typed in (("/health", f"{URL}health"), ("/up?deep&all", f"'{URL}up?deep&all'")):
        (tmp_path / "lm.yaml").write_text(f"{FILE}public: true\nreadiness: {path}\n")
        assert shell("serve", "lm.yaml").err.splitlines()[1:] == [f"     curl -sS {typed}"]


def test_later_releases_print_no_call_commands(shell: Shell, fake: FakeApiServer, file: str) -> None:
    fake.answers["POST", "/v1/services"] = 201, view(newest_release=2, rollout=rollout("canary"))
    result = shell("serve", file)
    assert (result.out, result.err) == (f"vision/chat: release 2, at {URL}\n", "")


def test_later_release_prints_what_changed(shell: Shell, fake: FakeApiServer, file: str) -> None:
    because = "working directory changed; replicas 2 -> 1, as the file says"
    fake.answers["POST", "/v1/services"] = 201, view(newest_release=2, because=because)
    assert shell("serve", file).out == f"vision/chat: release 2 ({because}), at {URL}\n"


def test_serve_waits_until_a_canary_is_through(shell: Shell, fake: FakeApiServer, file: str) -> None:
    service = view(newest_release=2, ready=1, rollout=rollout("canary"))
    fake.answers["POST", "/v1/services"] = 201, service
    fake.answers["GET", SHOWN] = [service, service, {**service, "release": 2, "rollout": rollout("done")}]
    assert shell("serve", file, "--wait", "60").code == 0
    assert fake.paths("GET").count(SHOWN) == 3


def test_serve_with_wait_fails_when_its_release_is_rolled_back(
    shell: Shell, fake: FakeApiServer, file: str
) -> None:
    service = view(newest_release=2, ready=1, rollout=rollout("canary"))
    fake.answers["POST", "/v1/services"] = 201, service
    fake.answers["GET", SHOWN] = [
        service,
        {**service, "rollout": rollout("rolled_back", "40 % of its requests fail")},
    ]
    result = shell("serve", file, "--wait", "60")
    assert result.code == 3
    assert result.err.splitlines() == [
        "error: release 2 of vision/chat was rolled back: 40 % of its requests fail",
        "hint: release 1 still serves; `shoal events vision/chat` lists what happened",
    ]


def test_serve_with_wait_prints_why_a_release_failed(shell: Shell, fake: FakeApiServer, file: str) -> None:
    gone = rollout("rolled_back", "3 replicas of it ended before they were ready")
    failure = {"ref": "vision/3", "at": 0.0, "because": "rank 0 exited with code 1\nImportError: flask"}
    fake.answers["POST", "/v1/services"] = 201, view(newest_release=2, rollout=rollout("rolling"))
    fake.answers["GET", SHOWN] = view(newest_release=2, ready=1, rollout=gone, failure=failure)
    errors = shell("serve", file, "--wait", "60").err.splitlines()[0]
    assert errors.endswith(
        "before they were ready; the last failure: rank 0 exited with code 1: ImportError: flask"
    )


@pytest.mark.parametrize(
    ("exit_code", "release", "is_told"), [(127, 2, True), (127, 1, False), (1, 2, False), (None, 2, False)]
)
def test_serve_with_wait_fails_at_once_if_the_program_does_not_exist(
    shell: Shell, fake: FakeApiServer, file: str, exit_code: int | None, release: int, is_told: bool
) -> None:
    because = "rank 0 exited with code 127: program `vllm` not found"
    service = view(newest_release=2, failure={"ref": "vision/3", "at": 0.0, "because": because})
    place = {"service_id": "svc_1", "service": "chat", "release": release, "slot": 0}
    path = answer_job(fake, exit_code=exit_code, replica=place)
    fake.answers["POST", "/v1/services"] = 201, service
    fake.answers["GET", SHOWN] = [service, service, view(release=2, newest_release=2, ready=1)]
    result = shell("serve", file, "--wait", "60")
    assert (result.code == 3) is is_told
    assert (f"release 2 of vision/chat cannot start: {because}" in " ".join(result.err.split())) is is_told
    assert fake.paths("GET").count(path) == 1, "one failure is looked at once"


def test_serve_with_wait_fails_when_another_release_overtakes(
    shell: Shell, fake: FakeApiServer, file: str
) -> None:
    fake.answers["POST", "/v1/services"] = 201, view(newest_release=2, rollout=rollout("rolling"))
    fake.answers["GET", SHOWN] = view(newest_release=3, ready=1, rollout={**rollout("rolling"), "new": 3})
    result = shell("serve", file, "--wait", "60")
    assert (result.code, result.err.splitlines()[0]) == (
        3,
        "error: release 2 of vision/chat was overtaken by release 3",
    )


def test_serve_with_wait_times_out_with_the_reason(shell: Shell, fake: FakeApiServer, file: str) -> None:
    failure = {
        "ref": "vision/3",
        "at": 0.0,
        "because": "exit code 1 on vm\nModuleNotFoundError: no module named flask",
    }
    answer_job(fake, exit_code=1)
    fake.answers["POST", "/v1/services"] = 201, view()
    fake.answers["GET", SHOWN] = view(failure=failure, servers=[])
    result = shell("serve", file, "--wait", "0.01")
    assert "exit code 1 on vm: ModuleNotFoundError: no module named flask" in result.err


@pytest.mark.parametrize(
    ("command", "text", "sentence", "typed"),
    [
        ("run", FILE, "a service file (it says `kind: service`); `shoal run` is for jobs", "serve"),
        ("run", "run: x\nreplicas: 2\n", "a service file (only a service has `replicas`)", "serve"),
        ("serve", "kind: job\nrun: x\n", "a job file (it says `kind: job`); `shoal serve` is for", "run"),
        ("serve", "name: x\nrun: x\narray: {index: 0..3}\n", "a job file (only a job has `array`)", "run"),
    ],
)
def test_file_of_the_other_kind_gets_the_right_command(
    shell: Shell, tmp_path: Path, command: str, text: str, sentence: str, typed: str
) -> None:
    (tmp_path / "it.yaml").write_text(text)
    result = shell(command, "it.yaml")
    error, hint = result.err.splitlines()
    assert (result.code, hint) == (2, f"hint: type `shoal {typed} it.yaml`")
    assert error.startswith(f"error: `it.yaml` is {sentence}")


def test_events_of_a_service_need_only_its_name(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["GET", "/v1/services"] = {"items": [view()], "next_cursor": None}
    fake.answers["GET", "/v1/events"] = {"items": [], "next_cursor": None}
    assert shell("events", "chat").code == 0
    query = fake.requests[-1].query
    assert (query["project"], query["service"], "job" in query) == (["vision"], ["chat"], False)


def test_events_of_a_name_without_a_service_are_of_the_job(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["GET", "/v1/services"] = {"items": [], "next_cursor": None}
    fake.answers["GET", "/v1/events"] = {"items": [], "next_cursor": None}
    for ref in ("train-7b", "vision/17", "17"):
        assert shell("events", ref).code == 0
        query = fake.requests[-1].query
        assert (query["job"], "service" in query) == ([job_view()["job_id"]], False)


def test_reasons_are_cut_on_a_terminal_and_whole_in_a_pipe(
    shell: Shell, fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "no module named flask, " * 8 + "the end"
    event = {"seq": 1, "at": 0.0, "kind": "replica.ended", "data": {"because": long}}
    fake.answers["GET", "/v1/events"] = {"items": [event], "next_cursor": None}
    fake.answers["GET", SHOWN] = view(resizes=[{"at": 0.0, "replicas": 1, "because": long}])
    for typed in (("events",), ("services", "svc_1")):
        assert shell(*typed).out.rstrip().endswith("~")
        with monkeypatch.context() as pipe:
            pipe.delenv("COLUMNS")
            assert shell(*typed).out.rstrip().endswith("the end")


def test_crashing_service_shows_its_last_output_and_a_hint(
    shell: Shell, fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 112.0)
    because = "vm: rank 0 exited with code 1\nTraceback:\nModuleNotFoundError: No module named \x1b[31mflask"
    failure = {"ref": "vision/7", "at": 100.0, "because": because}
    fake.answers["GET", SHOWN] = view(failures=3, failure=failure)
    assert shell("services", "svc_1").out.splitlines()[1:] == [
        "",
        "vision/7 ended 12s ago, 3 in a row: vm: rank 0 exited with code 1",
        "     Traceback:",
        "     ModuleNotFoundError: No module named flask",
        "hint: its output: `shoal logs vision/7`; fix the cause, then `shoal serve` its",
        "      file again",
    ]
    fake.answers["GET", SHOWN] = view(failures=3, failure=failure, ready=1)
    assert len(shell("services", "svc_1").out.splitlines()) == 1
    gone = rollout("rolled_back", "3 replicas of it ended before they were ready")
    fake.answers["GET", SHOWN] = view(failures=3, failure=failure, ready=1, newest_release=2, rollout=gone)
    assert "No module named flask" in shell("services", "svc_1").out


def test_unready_service_shows_for_how_long_and_why(
    shell: Shell, fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 120.0)
    monkeypatch.delenv("COLUMNS")
    because = "nothing answers at port 30000, path /health: connection refused"
    server = {"ref": "vision/8", "release": 1, "state": "running", "nodes": ["vm"], "started_at": 100.0,
              "address": "127.0.0.1:30000", "cold_start_s": None, "because": because}  # fmt: skip
    fake.answers["GET", SHOWN] = view(servers=[server])
    *_, output, hint = shell("services", "svc_1").out.splitlines()
    assert output == f"vision/8 runs but has not been ready for 20s: {because}"
    assert hint.startswith("hint: its output: `shoal logs vision/8`")


def test_replicas_waiting_for_the_same_reason_share_a_row(shell: Shell, fake: FakeApiServer) -> None:
    def server(number: int, state: str, because: str = "", release: int = 1) -> dict[str, Any]:
        return {"ref": f"vision/{number}", "release": release, "state": state, "nodes": [], "address": "",
                "cold_start_s": None, "because": because, "started_at": None}  # fmt: skip

    full = [server(number, "queued", "none is free") for number in range(2, 500)]
    few = [server(number, "queued", "no quota") for number in (500, 501, 502)]
    ready = [server(number, "ready") for number in (503, 504, 505, 506, 507)]
    fake.answers["GET", SHOWN] = view(servers=[*full[:200], *few, *full[200:], *ready], ready=5, replicas=506)
    lines = shell("services", "svc_1").out.splitlines()[2:]
    assert [" ".join(line.split()) for line in lines] == [
        "vision/2 1 queued - - - none is free",
        "497 more 1 queued - - - none is free",
        *(f"vision/{number} 1 queued - - - no quota" for number in (500, 501, 502)),
        *(f"vision/{number} 1 ready - - -" for number in (503, 504, 505, 506, 507)),
    ]


def test_help_of_serve_names_every_field_as_the_hint_of_a_bad_file_says() -> None:
    fields = " ".join(re.findall("`([^`]+)`", inspect.getdoc(services.serve) or ""))
    parts: list[type[BaseModel]] = [ServiceSpec, *SERVICE_FIELD_MODELS.values()]
    named = {name for part in parts for name in part.model_fields}
    assert sorted(named - set(re.findall("[a-z_]+", fields))) == []


def test_scaling_to_zero_says_what_callers_get(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["POST", f"{SHOWN}/scale"] = view(min_replicas=0, max_replicas=0)
    expected = "vision/chat: 0 replicas; calls are answered 503 until `shoal scale vision/chat 1`\n"
    assert shell("scale", "svc_1", "0").out == expected
    fake.answers["POST", f"{SHOWN}/scale"] = view(min_replicas=0, max_replicas=2)
    assert shell("scale", "svc_1", "0..2").out == "vision/chat: 0 to 2 replicas\n"
    fake.answers["POST", f"{SHOWN}/scale"] = view(min_replicas=1, max_replicas=1)
    assert shell("scale", "svc_1", "1").out == "vision/chat: 1 replica\n"


def test_reversed_replica_range_is_refused_with_a_hint(shell: Shell, fake: FakeApiServer) -> None:
    result = shell("scale", "chat", "3..1")
    assert (result.code, result.err.splitlines()) == (
        2,
        ["error: `3..1`: 3 at least is more than 1 at most", "hint: `shoal scale chat 1..3`"],
    )
    assert fake.requests == []


def test_replicas_of_a_canary_are_counted_separately(shell: Shell, fake: FakeApiServer) -> None:
    server = {"ref": "vision/1", "release": 1, "state": "ready", "nodes": [], "address": "",
              "cold_start_s": None, "because": "", "started_at": None}  # fmt: skip
    servers = [server, server, {**server, "release": 2}]
    service = view(newest_release=2, rollout=rollout("canary"), servers=servers, ready=3, replicas=2)
    fake.answers["GET", SHOWN] = service
    assert shell("services", "svc_1").out.splitlines()[0] == (
        "vision/chat: release 1, 2 of 2 ready, and 1 of release 2, canary to 2, step 1"
    )
    fake.answers["GET", "/v1/services"] = {"items": [service], "next_cursor": None}
    assert "2+1/2" in shell("services").out.split()


def test_missing_service_file_is_named_as_such(shell: Shell) -> None:
    assert shell("serve", "nosuch.yaml").err.startswith("error: cannot read the service file `nosuch.yaml`:")


def test_tokens_for_a_service_are_listed_with_the_service(shell: Shell, fake: FakeApiServer) -> None:
    token = {"id": "tok_1", "scope": "admin", "project": "vision", "label": ""}
    items = [{**token, "service": "chat"}, {**token, "id": "tok_2", "service": None}]
    fake.answers["GET", "/v1/tokens"] = {"items": items, "next_cursor": None}
    lines = shell("token").out.splitlines()
    assert lines[1].split() == ["tok_1", "calls", "chat", "vision", "valid"]
    assert lines[2].split() == ["tok_2", "admin", "vision", "valid"]


@pytest.mark.parametrize(("ref", "is_told"), [("chat", True), ("vision/chat", True), ("vision/17", False)])
def test_logs_and_why_of_a_service_say_which_replica_they_are_of(
    shell: Shell, fake: FakeApiServer, ref: str, is_told: bool
) -> None:
    place = {"service_id": "svc_1", "service": "chat", "release": 2, "slot": 3}
    job = job_view(status="running", name="chat", replica=place)
    fake.answers["GET", "/v1/jobs"] = {"items": [job], "next_cursor": None}
    fake.answers["GET", f"/v1/jobs/{job['job_id']}"] = {**job, "attempts": []}
    fake.answers["GET", f"/v1/jobs/{job['job_id']}/logs"] = {"items": [log_line("hi")], "next_cursor": None}
    fake.answers["GET", f"/v1/jobs/{job['job_id']}/why"] = {"status": "running", "sentence": "it runs"}
    expected = f"-- {ref} is a service; this is vision/17, a replica of release 2 (running)\n"
    for command in ("logs", "why"):
        assert shell(command, ref).err == (expected if is_told else "")
