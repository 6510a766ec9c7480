"""Each command asks the right question and prints what it was told."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import daemon, follow
from shoal.client.credentials import Credentials
from shoal.client.transport import Transport
from tests.support.cli import Shell
from tests.support.fake_server import TOKEN, FakeServer, job_view, running_fake, sse

JOB_ID = f"job_{17:026d}"
LOGS = f"/v1/jobs/{JOB_ID}/logs"


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with running_fake() as server:
        server.answers["GET", "/v1/jobs"] = {"items": [job_view()], "next_cursor": None}
        yield server


@pytest.fixture
def shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake: FakeServer
) -> Shell:
    made = Shell(tmp_path / "home", monkeypatch, capsys)
    made.talk_to(fake)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(follow, "PATIENCE_S", 0.0)
    return made


def line(text: str, rank: int | None = 0) -> dict[str, Any]:
    return {"at": 1_800_000_000.25, "node": "n1", "rank": rank, "stream": "o", "text": text}


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (("echo a; echo b",), "echo a; echo b"),
        (("python", "train.py", "--lr", "1 e"), "python train.py --lr '1 e'"),
        (("echo", "a; echo b"), "echo 'a; echo b'"),
    ],
)
def test_one_word_after_the_dashes_is_a_line_for_a_shell_and_several_are_a_program(
    shell: Shell, fake: FakeServer, typed: tuple[str, ...], line: str
) -> None:
    assert shell("run", "-d", "--", *typed).code == 0
    assert next(r for r in fake.seen if r.method == "POST").json()["flags"]["run"] == line


def test_run_streams_the_output_and_returns_the_jobs_exit_code(shell: Shell, fake: FakeServer) -> None:
    job = f"/v1/jobs/job_{1:026d}"
    fake.answers["GET", job] = job_view(number=1, status="running")
    end = {"status": "failed", "exit_code": 3, "because": "rank 1 exited with 3"}
    fake.streams[f"{job}/logs/stream"] = [
        [sse("attempt", {"epoch": 1, "nodes": ["n1"]}), sse("line", line("hi\x1b[31m!")), sse("end", end)]
    ]
    result = shell(
        "run", "--gpus", "8", "--nodes", "2", "-e", "A=b", "--", "python", "train.py", "--lr", "1 e"
    )
    assert result.code == 3
    assert result.out == "[0] hi!\n"
    assert "vision/1 failed: rank 1 exited with 3" in result.err
    body = next(r for r in fake.seen if r.method == "POST").json()
    told = {"gpus": "8", "nodes": "2", "env": ["A=b"], "run": "python train.py --lr '1 e'"}
    assert body == {"flags": told}


def test_a_job_that_waits_is_explained_before_it_is_followed(shell: Shell, fake: FakeServer) -> None:
    job = f"/v1/jobs/job_{1:026d}"
    fake.answers["GET", job] = job_view(number=1)
    told = {"why": "resources", "sentence": "needs 8 GPUs; 3 are free", "details": ["n2 busy"], "hint": None}
    fake.answers["GET", f"{job}/why"] = {
        "status": "queued",
        "explanation": told,
        "sentence": told["sentence"],
    }
    fake.streams[f"{job}/logs/stream"] = [[sse("end", {"status": "succeeded", "exit_code": 0})]]
    result = shell("run", "--", "true")
    assert result.code == 0
    assert "-- waiting: needs 8 GPUs; 3 are free\n--   n2 busy\n" in result.err


def test_detached_run_prints_the_reference_alone(shell: Shell, fake: FakeServer) -> None:
    result = shell("run", "-d", "--", "true")
    assert (result.code, result.out) == (0, "vision/1\n")


def test_json_of_a_run_names_the_job_as_one_would_type_it(shell: Shell, fake: FakeServer) -> None:
    assert shell("run", "-d", "--json", "--", "true").json()["ref"] == "vision/1"
    job = f"/v1/jobs/job_{2:026d}"
    fake.answers["GET", job] = job_view(number=2, status="running")
    fake.streams[f"{job}/logs/stream"] = [[sse("end", {"status": "succeeded", "exit_code": 0})]]
    told = [json.loads(text) for text in shell("run", "--json", "--", "true").out.splitlines()]
    assert told[0] == {"event": "submitted", "ref": "vision/2", "job_id": f"job_{2:026d}"}
    submit_array(fake, ["queued"])
    assert shell("run", "-d", "--json", "--array", "1", "--", "true").json()["ref"] == "arr_1"


def submit_array(fake: FakeServer, statuses: list[str]) -> None:
    """The next submit is an array whose elements are in these states."""
    words = "n1: rank 0 exited with code 4\noh no\x1b[31m"
    jobs = [
        job_view(
            20 + index,
            status,
            name="job-20",
            array={"id": "arr_1", "index": index, "size": len(statuses)},
            because=words if status == "failed" else "",
        )
        for index, status in enumerate(statuses)
    ]
    fake.answers["POST", "/v1/jobs"] = (201, {"jobs": jobs, "count": len(jobs), "array_id": "arr_1"})
    fake.answers["GET", "/v1/jobs"] = {"items": jobs[::-1], "next_cursor": None}


def test_the_first_element_that_fails_speaks_and_the_others_are_named(shell: Shell, fake: FakeServer) -> None:
    submit_array(fake, ["succeeded", "failed", "failed"])
    result = shell("run", "--array", "3", "--", "true")
    assert result.code == 1
    assert result.err == (
        "-- job-20: 3 jobs submitted, from vision/20; `shoal logs 'job-20[0]'` shows the output of one\n"
        "-- 3 of 3 done, 2 failed\n"
        "-- job-20[1] (vision/21) failed: n1: rank 0 exited with code 4\n"
        "     oh no\n"
        "     its output: `shoal logs vision/21`\n"
        "-- job-20[2] (vision/22) failed: n1: rank 0 exited with code 4\n"
    )


def name_array(fake: FakeServer, statuses: list[str]) -> None:
    """`job-20` is an array whose elements are in these states."""
    submit_array(fake, statuses)
    listed = fake.answers["GET", "/v1/jobs"]
    found = {"items": listed["items"][:1], "next_cursor": None, "array_id": "arr_1"}
    fake.answers["GET", "/v1/jobs"] = lambda request: found if "ref" in request.query else listed


def test_retry_of_an_array_leaves_what_succeeded_or_is_open_alone(shell: Shell, fake: FakeServer) -> None:
    name_array(fake, ["succeeded", "failed", "running", "cancelled"])
    for number in range(20, 24):
        path = f"/v1/jobs/job_{number:026d}/retry"
        fake.answers["POST", path] = job_view(number, "queued", name="job-20")
    assert shell("retry", "job-20").out == "vision/21: queued\nvision/23: queued\n"
    name_array(fake, ["succeeded", "running"])
    refused = shell("retry", "job-20")
    assert refused.code == 3
    assert "no element of array `job-20` has failed or was cancelled" in refused.err


def test_of_many_failed_elements_ten_are_named(shell: Shell, fake: FakeServer) -> None:
    submit_array(fake, ["failed"] * 12)
    told = shell("run", "--array", "12", "--", "true").err.splitlines()
    assert len([text for text in told if "] (vision/" in text]) == 10
    assert told[-1] == "-- and 2 more: `shoal queue --all --name job-20`"


def test_an_array_that_went_well_says_nothing_more(shell: Shell, fake: FakeServer) -> None:
    submit_array(fake, ["succeeded", "succeeded"])
    result = shell("run", "--array", "2", "--", "true")
    assert result.code == 0
    assert result.err.endswith("-- 2 of 2 done\n")


def test_last_words_stand_on_lines_of_their_own(shell: Shell, fake: FakeServer) -> None:
    job = f"/v1/jobs/job_{1:026d}"
    because = "n1: rank 0 exited with code 2\npython: can't open file 'nope.py'"
    fake.answers["GET", job] = job_view(number=1, status="running")
    end = {"status": "failed", "exit_code": 2, "because": because}
    fake.streams[f"{job}/logs/stream"] = [[sse("end", end)]]
    told = shell("run", "--", "python", "nope.py").err
    assert told.endswith(
        "-- vision/1 failed: n1: rank 0 exited with code 2\n     python: can't open file 'nope.py'\n"
    )
    sentence = {"status": "failed", "explanation": None, "sentence": f"vision/17 failed: {because}"}
    fake.answers["GET", f"/v1/jobs/{JOB_ID}/why"] = sentence
    why = shell("why", JOB_ID).out
    assert why == "vision/17 failed: n1: rank 0 exited with code 2\n  python: can't open file 'nope.py'\n"


@pytest.mark.parametrize(
    "typed", [("-", "-d"), ("-d", "-"), ("--gpus", "2", "-", "-d"), ("-d", "-", "-n", "other", "--", "true")]
)
def test_a_job_file_comes_on_standard_input_wherever_the_dash_stands(
    shell: Shell, fake: FakeServer, monkeypatch: pytest.MonkeyPatch, typed: tuple[str, ...]
) -> None:
    words = io.TextIOWrapper(io.BytesIO(b"name: piped\nrun: python train.py\n"))
    monkeypatch.setattr("sys.stdin", words)
    assert shell("run", *typed).code == 0
    spec = next(r for r in fake.seen if r.method == "POST").json()["spec"]
    assert spec["name"] == ("other" if "other" in typed else "piped")
    assert spec["run"] == ("true" if "--" in typed else "python train.py")


def test_a_dash_that_is_a_flags_value_is_no_job_file(shell: Shell) -> None:
    assert "standard input" not in shell("run", "--name", "-", "--", "true").err


def test_a_run_from_an_empty_directory_is_one_request(shell: Shell, fake: FakeServer) -> None:
    assert shell("run", "-d", "--", "true").code == 0
    assert [(request.method, request.path) for request in fake.seen] == [("POST", "/v1/jobs")]


def test_a_directory_the_server_knows_is_not_sent_again(
    shell: Shell, fake: FakeServer, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    for _ in range(2):
        assert shell("run", "-d", "-p", "vision", "--", "true").code == 0
    assert [request.method for request in fake.seen] == ["POST", "PUT", "POST", "POST"]
    assert fake.seen[1].query == {"project": ["vision"]}


@pytest.mark.parametrize("flags", [("--workdir", ""), ("--workdir", "", "--priority", "-5")])
def test_an_empty_workdir_sends_nothing_along(
    shell: Shell, fake: FakeServer, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").touch()
    assert shell("run", "-d", *flags, "--", "true").code == 0
    (body,) = [request.json() for request in fake.seen]
    assert body["flags"]["workdir"] == ""
    assert "archive" not in body


def test_mistakes_in_flags_are_found_before_a_control_plane_is_started(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_URL")
    monkeypatch.setattr(daemon, "start", lambda: pytest.fail("it was started"))
    result = shell("run", "--cpus", "0", "--nodes", "none", "--", "true")
    assert result.code == 2
    assert {line.split("`")[1] for line in result.err.splitlines()[:2]} == {"--cpus", "--nodes"}


def test_interrupting_a_run_detaches_and_says_how_to_go_on(
    shell: Shell, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(follow, "print_stream", interrupt)
    fake.answers["GET", f"/v1/jobs/job_{1:026d}"] = job_view(number=1, status="running")
    result = shell("run", "--", "sleep", "100")
    assert result.code == 130
    assert "`shoal logs -f vision/1`" in result.err
    assert "`shoal stop vision/1`" in result.err
    assert not [path for path in fake.paths("POST") if path.endswith("stop")]


def test_a_file_and_flags_are_one_job_and_the_workdir_is_the_files(
    shell: Shell, fake: FakeServer, tmp_path: Path
) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "job.yaml").write_text("name: a\nrun: python a.py\nresources: {gpus: 2}\n")
    (tmp_path / "elsewhere").write_text("not sent")
    assert shell("run", "jobs/job.yaml", "-d", "--name", "b").code == 0
    assert shell("run", "jobs/job.yaml", "-d").code == 0
    bodies = [request.json() for request in fake.seen if request.method == "POST"]
    assert [body["spec"]["name"] for body in bodies] == ["b", "b", "a"]
    assert len(fake.paths("PUT")) == 1
    assert bodies[0]["archive"] == bodies[1]["archive"] == fake.paths("PUT")[0].rsplit("/", 1)[1]
    (archive,) = fake.archives.values()
    assert b"job.yaml" in archive
    assert b"elsewhere" not in archive


def test_the_project_is_the_servers_to_choose_where_none_is_named(
    shell: Shell, fake: FakeServer, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    assert shell("run", "-d", "--", "true").code == 0
    posted, put, _ = fake.seen
    assert "project" not in {**posted.json(), **posted.json()["flags"], **put.query}
    told = "which project? You may submit to: a, b"
    fake.answers["POST", "/v1/jobs"] = fake.problem(422, "spec.invalid", told, hint="add `--project a`")
    result = shell("run", "-d", "--", "true")
    assert (result.code, result.err) == (2, f"error: {told}\nhint: add `--project a`\n")


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("logs", "`shoal logs` needs JOB"),
        ("logs a b", "`b` is one word too many"),
        ("logs a --tail x", "`--tail` takes a whole number, not `x`"),
        ("logs a --tail", "`--tail` needs a value"),
        ("run --gpsu 3", "unknown option `--gpsu`; did you mean `--gpus`?"),
        ("logs a -z", "unknown option `-z`"),
        ("logs a -r 1 -r 2", "`-r` is given more than once"),
        ("completion csh", "`SHELL` is one of `bash`, `zsh`, `fish`, not `csh`; did you mean `zsh`?"),
        ("queue --json=3", "`--json` takes no value"),
        ("statu", "unknown command `statu`; did you mean `status`?"),
    ],
)
def test_the_parsers_words_become_plain_sentences(shell: Shell, typed: str, sentence: str) -> None:
    result = shell(*typed.split())
    assert result.code == 2
    assert result.err.splitlines()[0] == f"error: {sentence}"


def test_logs_of_a_job_that_waits_say_so(shell: Shell, fake: FakeServer) -> None:
    fake.answers["GET", f"/v1/jobs/{JOB_ID}"] = job_view()
    fake.answers["GET", LOGS] = {"items": [], "next_cursor": None, "is_complete": False}
    told = "-- vision/17 waits and has not begun: `shoal why vision/17` says for what\n"
    assert shell("logs", JOB_ID).err == told
    fake.streams[f"{LOGS}/stream"] = [[sse("end", {"status": "succeeded"})]]
    assert shell("logs", "-f", JOB_ID).err == told


def test_a_rank_that_a_job_has_not_is_refused(shell: Shell, fake: FakeServer) -> None:
    job = job_view(status="running", attempts=[{"nodes": ["n1"]}, {"nodes": []}])
    job["request"]["ranks_per_node"] = 2
    fake.answers["GET", f"/v1/jobs/{JOB_ID}"] = job
    fake.answers["GET", LOGS] = {"items": [line("hi", 1)], "next_cursor": None, "is_complete": True}
    refused = shell("logs", JOB_ID, "--rank", "7")
    assert refused.code == 2
    assert "`--rank 7`: job vision/17 has 2 ranks, 0 to 1" in refused.err
    assert shell("logs", JOB_ID, "--rank", "1").out == "[1] hi\n"


def test_a_new_token_says_how_far_it_reaches_and_why(shell: Shell, fake: FakeServer) -> None:
    made = {"id": "tok_1", "scope": "admin", "project": None, "text": "shl_x"}
    fake.answers["POST", "/v1/tokens"] = (201, made)
    given = shell("token", "create", "--user", "vic")
    assert given.out == "shl_x\n"
    assert "scope admin, that of your own token: it may do all that vic may" in given.err
    made["scope"], made["project"] = "viewer", "vision"
    assert "scope viewer in project vision alone\n" in shell("token", "create", "--scope", "viewer").err


def test_names_are_not_cut_in_a_pipe(shell: Shell, fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "a-name-that-is-much-longer-than-its-column-in-a-table-of-eighty-columns"
    fake.answers["GET", "/v1/jobs"] = {"items": [job_view(status="running", name=name)], "next_cursor": None}
    assert name not in shell("queue").out
    monkeypatch.delenv("COLUMNS")
    assert name in shell("queue").out


def test_an_attempt_that_another_follows_is_told_with_its_reason(shell: Shell, fake: FakeServer) -> None:
    job = f"/v1/jobs/job_{1:026d}"
    fake.answers["GET", job] = job_view(number=1, status="running")
    exited = {"epoch": 1, "reason": "exit", "exit_code": 3, "message": "n1: rank 0 exited with code 3\nbye"}
    lost = {"epoch": 2, "reason": "lost", "message": "its supervisor died on n2", "again_in_s": 0.4}
    fake.streams[f"{job}/logs/stream"] = [
        [
            sse("again", {**exited, "again_in_s": 4.9}),
            sse("again", lost),
            sse("line", {**line("pip", None), "stream": "s"}),
            sse("line", {**line("ours", None), "stream": "e"}),
            sse("end", {"status": "succeeded"}),
        ]
    ]
    result = shell("run", "--", "true")
    assert "-- attempt 1 failed: n1: rank 0 exited with code 3; again in 5 s\n" in result.err
    assert "-- attempt 2 lost: its supervisor died on n2\n" in result.err
    assert result.out == "[setup] pip\n[shoal] ours\n"


def test_a_server_that_stays_away_leaves_how_to_follow_again(
    shell: Shell, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = f"/v1/jobs/job_{1:026d}"
    fake.answers["GET", job] = job_view(number=1, status="running")
    fake.answers["GET", f"{job}/logs/stream"] = fake.problem(503, "server.unreachable", "away")
    monkeypatch.setattr(Transport, "pauses", lambda *_, **__: iter([True, True]))
    result = shell("run", "--", "true")
    assert result.code == 6
    told = f"-- no answer from {fake.url}; the job runs on; trying again for 60 s\n"
    assert result.err.count(told) == 1
    assert "`shoal logs -f vision/1` follows the job again" in result.err


def test_why_of_a_job_that_ended_shows_its_attempts(shell: Shell, fake: FakeServer) -> None:
    began = 1_800_000_100.0
    tried = {"attempt_id": "att_1", "state": "ended", "queued_at": 0.0, "placed_at": 0.0, "exit_code": None}
    lost = {**tried, "epoch": 1, "nodes": ["n1", "n2"], "started_at": began, "ended_at": began + 12,
            "reason": "lost", "message": "its supervisor died on n2"}  # fmt: skip
    failed = {**tried, "epoch": 2, "nodes": ["n1"], "started_at": began + 20, "ended_at": began + 90,
              "reason": "oom", "message": "n1: rank 0 ran out of memory\nbye"}  # fmt: skip
    job = job_view(status="failed", ended_at=began + 90, exit_code=137, failures=1, losses=1)
    answer = {"job": job, "status": "failed", "explanation": None, "sentence": "vision/17 failed: oom",
              "attempts": [lost, failed], "max_failures": 3, "checkpoint_dir": "/srv/ckpt"}  # fmt: skip
    fake.answers["GET", f"/v1/jobs/{JOB_ID}/why"] = answer
    assert shell("why", JOB_ID).out == (
        "vision/17 failed: oom\n"
        "ATTEMPT  NODES  BEGAN           RAN    HOW IT ENDED\n"
        "1        n1+1   01-15 08:01:40  12s    lost: its supervisor died on n2\n"
        "2        n1     01-15 08:02:00  1m10s  failed: n1: rank 0 ran out of memory\n"
        "took 3m10s from submit to end; exit code 137\n"
        "1 of 3 attempts used; 1 more lost by the cluster, which are not counted\n"
        "checkpoint: /srv/ckpt\n"
    )
    assert shell("why", JOB_ID, "--json").json() == answer
    answer["status"] = "queued"
    answer["attempts"] = [{**failed, "ended_at": None, "started_at": None, "state": "queued"}]
    assert shell("why", JOB_ID).out == "vision/17 failed: oom\n"


def test_why_of_a_job_that_runs_is_the_servers_sentence(shell: Shell, fake: FakeServer) -> None:
    told = {"status": "running", "explanation": None, "sentence": "vision/17 is running on n1"}
    fake.answers["GET", f"/v1/jobs/{JOB_ID}/why"] = told
    assert shell("why", "17").out == "vision/17 is running on n1\n"


def an_array(fake: FakeServer) -> None:
    place = {"array_id": "arr_1", "size": 2}
    items = [job_view(n, "stopping", array={**place, "index": n}) for n in (17, 16)]

    def listed(request: Any) -> Any:
        if "ref" in request.query:
            return {"items": items[:1], "next_cursor": None, "array_id": "arr_1"}
        return {"items": items, "next_cursor": None}

    fake.answers["GET", "/v1/jobs"] = listed
    fake.answers["POST", "/v1/arrays/arr_1/stop"] = {"array_id": "arr_1", "count": 2, "jobs": items}


def test_the_name_of_an_array_stops_all_of_it(shell: Shell, fake: FakeServer) -> None:
    an_array(fake)
    assert shell("stop", "sweep").out == "vision/16: stopping\nvision/17: stopping\n"
    assert fake.paths("POST") == ["/v1/arrays/arr_1/stop"]


def test_the_element_that_stands_for_an_array_is_named(shell: Shell, fake: FakeServer) -> None:
    an_array(fake)
    fake.answers["GET", f"/v1/jobs/{JOB_ID}/why"] = {"status": "running", "sentence": "it runs"}
    told = shell("why", "sweep")
    assert told.out == "it runs\n"
    assert told.err == "-- sweep is an array of 2; this is its newest element, vision/17\n"


def test_events_show_the_newest_unless_told_from_where(shell: Shell, fake: FakeServer) -> None:
    def page(request: Any) -> Any:
        numbers = range(1, 2501)
        if "tail" in request.query:
            numbers = numbers[-int(request.query["tail"][0]) :]
        else:
            numbers = numbers[int(request.query["after"][0]) :][: int(request.query["limit"][0])]
        return {
            "items": [{"seq": n, "at": 0.0, "kind": "job.submitted"} for n in numbers],
            "next_cursor": None,
        }

    fake.answers["GET", "/v1/events"] = page
    assert [event["seq"] for event in shell("events", "-n", "3", "--json").json()] == [2498, 2499, 2500]
    assert len(fake.seen) == 1
    assert [event["seq"] for event in shell("events", "-n", "2", "--after", "7", "--json").json()] == [8, 9]


def test_every_mistake_in_a_job_is_printed_and_nothing_is_sent(
    shell: Shell, fake: FakeServer, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text("run: x\nresources:\n  gpu: 2\nprioritty: 3\n")
    result = shell("run", "job.yaml")
    assert result.code == 2
    assert len([text for text in result.err.splitlines() if text.startswith("error: job.yaml:")]) == 2
    assert not fake.seen


def test_a_program_without_dashes_is_explained(shell: Shell) -> None:
    result = shell("run", "python", "train.py")
    assert result.code == 2
    result = shell("run", "python")
    assert "a program comes after `--`" in result.err


def test_a_missing_secret_is_named_before_anything_is_sent(shell: Shell, fake: FakeServer) -> None:
    result = shell("run", "--secret", "HF_TOKEN_X", "--", "true")
    assert result.code == 2
    assert "`HF_TOKEN_X` is not set" in result.err
    assert "POST" not in {request.method for request in fake.seen}


def test_secrets_travel_beside_the_spec(
    shell: Shell, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN_X", "s3cret")
    shell("run", "-d", "--secret", "HF_TOKEN_X", "--", "true")
    body = next(request for request in fake.seen if request.method == "POST").json()
    assert body["secrets"] == {"HF_TOKEN_X": "s3cret"}
    assert "s3cret" not in json.dumps(body["flags"])


def test_logs_print_rank_and_text_and_neutralise_escapes(shell: Shell, fake: FakeServer) -> None:
    items = [line("loss 1.0\x1b]0;x\x07"), line("setup", None), line("b\r30%\r100%", 11)]
    fake.answers["GET", LOGS] = {"items": items, "next_cursor": None, "is_complete": True}
    assert shell("logs", "17").out == "[0] loss 1.0\n[shoal] setup\n[11] 100%\n"
    assert shell("logs", "17", "-t").out.startswith("08:00:00.250 [0] loss")
    assert [json.loads(text)["rank"] for text in shell("logs", "17", "--json").out.splitlines()] == [
        0,
        None,
        11,
    ]


def test_logs_follow_every_page(shell: Shell, fake: FakeServer) -> None:
    pages = [
        {"items": [line("one")], "next_cursor": "c1", "is_complete": False},
        {"items": [line("two")], "next_cursor": "c2", "is_complete": True},
        {"items": [], "next_cursor": "c2", "is_complete": True},
    ]
    fake.answers["GET", LOGS] = pages
    assert shell("logs", "17").out == "[0] one\n[0] two\n"


def test_queue_asks_for_open_jobs_unless_told_otherwise(shell: Shell, fake: FakeServer) -> None:
    shell("queue", "--json")
    shell("queue", "--all", "--json", "-p", "vision")
    assert fake.seen[0].query["status"] == ["queued", "starting", "running", "stopping"]
    assert "status" not in fake.seen[1].query
    assert fake.seen[1].query["project"] == ["vision"]


def test_a_status_that_is_none_is_named_with_those_there_are(shell: Shell, fake: FakeServer) -> None:
    result = shell("queue", "--status", "faild")
    assert result.code == 2
    for word in ("faild", "queued", "cancelled", "did you mean `failed`?"):
        assert word in result.err
    assert not fake.seen
    assert shell("queue", "--status", "failed", "--status", "running").code == 0
    assert fake.seen[0].query["status"] == ["failed", "running"]


@pytest.mark.parametrize("argv", [("queue",), ("events",), ("run", "-d")])
def test_a_project_that_is_not_there_is_named(shell: Shell, fake: FakeServer, argv: tuple[str, ...]) -> None:
    nothing = fake.problem(404, "not_found", "no such thing, or one you may not see")
    for place in (("GET", "/v1/jobs"), ("POST", "/v1/jobs"), ("GET", "/v1/events")):
        fake.answers[place] = nothing
    result = shell(*argv, "-p", "nope", *(("--", "true") if argv[0] == "run" else ()))
    assert result.code == 4
    assert result.err.startswith("error: no project `nope`, or one you may not see\n")


def test_a_number_in_two_projects_lists_what_to_type(shell: Shell, fake: FakeServer) -> None:
    jobs = [job_view(17), job_view(17, ref="nlp/17", project="nlp")]
    fake.answers["GET", "/v1/jobs"] = {"items": jobs, "next_cursor": None}
    result = shell("logs", "17")
    assert result.code == 2
    assert result.err == "error: `17` is a job in 2 projects\nhint: type one of `vision/17`, `nlp/17`\n"


def test_stopping_what_has_ended_says_how_it_ended(shell: Shell, fake: FakeServer) -> None:
    ended = job_view(status="failed", because="n1: rank 0 exited with code 1\noh no")
    fake.answers["POST", f"/v1/jobs/{JOB_ID}/stop"] = ended
    result = shell("stop", JOB_ID)
    told = "vision/17: had ended already: failed (n1: rank 0 exited with code 1: oh no)\n"
    assert (result.code, result.out) == (0, told)
    fake.answers["POST", f"/v1/jobs/{JOB_ID}/stop"] = job_view(status="cancelled", because="stopped by ana")
    assert shell("stop", JOB_ID).out == "vision/17: cancelled (stopped by ana)\n"


def test_following_events_keeps_to_what_was_asked_for(
    shell: Shell, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.cli.events.line", interrupt)
    fake.streams["/v1/events/stream"] = [[sse("event", {"seq": 1, "at": 0.0, "kind": "node.added"})]]
    assert shell("events", "-f", "-p", "vision", "--node", "n1", "--kind", "node.").code == 130
    (seen,) = fake.seen
    assert seen.query == {"project": ["vision"], "node": ["n1"], "kind": ["node."]}


def test_stop_goes_on_after_a_job_that_cannot_be_stopped(shell: Shell, fake: FakeServer) -> None:
    fake.answers["POST", "/v1/jobs/job_a/stop"] = fake.problem(409, "state.conflict", "it has ended")
    fake.answers["POST", "/v1/jobs/job_b/stop"] = job_view(status="stopping")
    result = shell("stop", "job_a", "job_b")
    assert result.code == 3
    assert result.out == "vision/17: stopping\n"
    assert "error: it has ended" in result.err


@pytest.mark.parametrize(
    ("argv", "path"),
    [
        (("drain", "n1", "--because", "bad NVLink"), "/v1/nodes/n1/drain"),
        (("nodes", "drain", "n1", "-m", "bad NVLink"), "/v1/nodes/n1/drain"),
        (("resume", "n1"), "/v1/nodes/n1/resume"),
        (("nodes", "cordon", "n1"), "/v1/nodes/n1/cordon"),
        (("nodes", "declare-dead", "n1"), "/v1/nodes/n1/declare-dead"),
    ],
)
def test_node_commands_send_their_reason(
    shell: Shell, fake: FakeServer, argv: tuple[str, ...], path: str
) -> None:
    fake.answers["POST", path] = {"name": "n1", "state": "draining", "is_alive": True}
    result = shell(*argv)
    assert (result.code, result.out) == (0, "n1: draining\n")
    assert fake.seen[0].json() == {"because": "bad NVLink" if "bad NVLink" in argv else ""}


def test_login_checks_the_token_before_it_saves_it(
    shell: Shell, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SHOAL_URL", "SHOAL_TOKEN"):
        monkeypatch.delenv(name)
    me = {"user": "ana", "cluster_role": "admin", "projects": [{"name": "vision", "role": "lead"}]}
    fake.answers["GET", "/v1/me"] = [fake.problem(401, "unauthenticated", "not known"), me]
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{TOKEN}\n"))
    assert shell("login", fake.url).code == 4
    assert not Credentials(shell.home).path.exists()
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{TOKEN}\n"))
    result = shell("login", fake.url, "--token-stdin")
    assert result.code == 0
    assert result.out == f"you are ana (admin) at {fake.url}\n  vision: lead\n"
    assert Credentials(shell.home).token(fake.url) == TOKEN
    assert Credentials(shell.home).listener_uid(fake.url) == os.geteuid()
    assert Credentials(shell.home).load()["current"] == fake.url
    assert TOKEN not in result.out + result.err


def test_login_without_a_token_says_what_to_type(
    shell: Shell, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    result = shell("login", fake.url)
    assert result.code == 2
    assert result.err.startswith("error: no token was given\n")
    assert f"`shoal login {fake.url}`" in result.err
    assert "--token-stdin" in result.err


def test_logging_in_under_a_variable_that_goes_before_it_is_said(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "note: SHOAL_URL is set and goes before" in shell("login", "https://far:1").err


def test_a_new_token_is_alone_on_standard_output(shell: Shell, fake: FakeServer) -> None:
    fake.answers["POST", "/v1/tokens"] = (201, {"id": "tok_1", "text": "shl_tok_1_secret", "scope": "member"})
    result = shell("token", "create", "--user", "bob", "--lifetime", "30d", "--scope", "member")
    assert result.out == "shl_tok_1_secret\n"
    assert fake.seen[0].json() == {"user": "bob", "scope": "member", "lifetime_s": 2592000.0, "label": ""}


def test_people_commands_send_what_was_typed(shell: Shell, fake: FakeServer) -> None:
    fake.answers["POST", "/v1/users"] = (201, {"name": "bob", "cluster_role": None})
    fake.answers["PATCH", "/v1/users/bob"] = {"name": "bob"}
    fake.answers["POST", "/v1/projects"] = (201, {"name": "vision"})
    fake.answers["PUT", "/v1/projects/vision/members/bob"] = {
        "user": "bob",
        "project": "vision",
        "role": "lead",
    }
    fake.answers["DELETE", "/v1/projects/vision/members/bob"] = {"user": "bob", "project": "vision"}
    assert shell("user", "create", "bob").code == 0
    assert shell("user", "update", "bob", "--no-active", "--role", "none").code == 0
    assert shell("project", "create", "vision", "--max-open-jobs", "5").code == 0
    assert shell("project", "add", "vision", "bob", "--role", "lead").out == "bob is lead of vision\n"
    assert shell("project", "remove", "vision", "bob").code == 0
    bodies = [request.json() for request in fake.seen if request.body]
    assert bodies == [
        {"name": "bob", "cluster_role": None},
        {"cluster_role": None, "is_active": False},
        {"name": "vision", "max_open_jobs": 5},
        {"role": "lead"},
    ]


def test_a_broken_audit_chain_exits_1(shell: Shell, fake: FakeServer) -> None:
    broken = {"is_intact": False, "first_bad": 12, "because": "its hash does not follow", "head": None}
    fake.answers["GET", "/v1/audit/verify"] = broken
    result = shell("audit", "--verify")
    assert (result.code, result.out) == (1, "broken at entry 12: its hash does not follow\n")


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ({"status": "succeeded", "exit_code": 0}, 0),
        ({"status": "failed", "exit_code": 137}, 137),
        ({"status": "failed", "exit_code": None}, 1),
        ({"status": "failed", "exit_code": 0}, 1),
        ({"status": "failed", "exit_code": 256}, 1),
        ({"status": "cancelled", "exit_code": 143}, 143),
        ({}, 1),
    ],
)
def test_an_end_that_is_no_success_is_never_exit_0(end: dict[str, Any], code: int) -> None:
    assert follow.exit_code(end) == code
