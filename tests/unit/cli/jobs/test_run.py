"""`shoal run` of jobs and arrays, from the typed command to the exit code."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.control_plane import daemon
from shoal.cli.jobs import follow
from shoal.client.transport import Transport
from shoal.spec import spec_from_flags
from tests.support.fakes.api_server import FakeApiServer, Shell, job_view, log_line, sse

JOB_ID = f"job_{17:026d}"


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (("echo a; echo b",), "echo a; echo b"),
        (("python", "train.py", "--lr", "1 e"), "python train.py --lr '1 e'"),
        (("echo", "a; echo b"), "echo 'a; echo b'"),
    ],
)
def test_one_word_after_the_dashes_is_a_line_for_a_shell_and_several_are_a_program(
    shell: Shell, fake: FakeApiServer, typed: tuple[str, ...], line: str
) -> None:
    assert shell("run", "-d", "--", *typed).code == 0
    assert next(r for r in fake.requests if r.method == "POST").json()["flags"]["run"] == line


def test_run_streams_the_output_and_returns_the_jobs_exit_code(shell: Shell, fake: FakeApiServer) -> None:
    job = f"/v1/jobs/job_{1:026d}"
    fake.answers["GET", job] = job_view(number=1, status="running")
    end = {"status": "failed", "exit_code": 3, "because": "rank 1 exited with 3"}
    fake.streams[f"{job}/logs/stream"] = [
        [sse("attempt", {"epoch": 1, "nodes": ["n1"]}), sse("line", log_line("hi\x1b[31m!")), sse("end", end)]
    ]
    result = shell(
        "run", "--gpus", "8", "--nodes", "2", "-e", "A=b", "--", "python", "train.py", "--lr", "1 e"
    )
    assert result.code == 3
    assert result.out == "[0] hi!\n"
    assert "vision/1 failed: rank 1 exited with 3" in result.err
    body = next(r for r in fake.requests if r.method == "POST").json()
    flags = {"gpus": "8", "nodes": "2", "env": ["A=b"], "run": "python train.py --lr '1 e'"}
    assert body == {"flags": flags}


def test_switches_travel_as_text_that_the_server_reads(shell: Shell, fake: FakeApiServer) -> None:
    assert shell("run", "-d", "--exclusive", "--shared", "--", "true").code == 0
    document = next(r for r in fake.requests if r.method == "POST").json()["flags"]
    assert document == {"exclusive": "true", "shared": "true", "run": "true"}
    spec = spec_from_flags(**document)
    assert (spec.resources.exclusive, spec.shared) == (True, True)


def test_files_not_copied_are_reported_once_and_in_json(
    shell: Shell, fake: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("*.bin\n")
    (tmp_path / "data").mkdir()
    for name, size in (("train.bin", 400_000), ("val.bin", 200_000)):
        (tmp_path / "data" / name).write_bytes(b"x" * size)
    monkeypatch.chdir(tmp_path)
    result = shell("run", "-d", "--json", "--", "true")
    assert (
        "note: 2 files, 586 KiB, ignored by git, are not copied: data/train.bin, data/val.bin; add them with "
        "`--include data/`" in " ".join(result.err.split())
    )
    document = json.loads(result.out)["left_behind"]
    assert (document["num_files"], document["size_bytes"], document["add_with"]) == (2, 600_000, "data/")
    sent = [r.json()["left_behind"] for r in fake.requests if r.method == "POST"]
    assert all(set(report["ignored"]) == {"data/train.bin", "data/val.bin"} for report in sent)
    assert "not copied" not in shell("run", "-d", "--include", "*.bin", "--", "true").err
    (tmp_path / "all.bin").write_text("x")
    document = " ".join(shell("run", "-d", "--", "true").err.split())
    assert "add those the job needs, such as with `--include data/train.bin`" in document


def test_a_job_that_waits_is_explained_before_it_is_followed(shell: Shell, fake: FakeApiServer) -> None:
    job = f"/v1/jobs/job_{1:026d}"
    fake.answers["GET", job] = job_view(number=1)
    explanation = {
        "why": "resources",
        "sentence": "needs 8 GPUs; 3 are free",
        "details": ["n2 busy"],
        "hint": None,
    }
    fake.answers["GET", f"{job}/why"] = {
        "status": "queued",
        "explanation": explanation,
        "sentence": explanation["sentence"],
    }
    fake.streams[f"{job}/logs/stream"] = [[sse("end", {"status": "succeeded", "exit_code": 0})]]
    result = shell("run", "--", "true")
    assert result.code == 0
    assert "-- waiting: needs 8 GPUs; 3 are free\n--   n2 busy\n" in result.err


def test_detached_run_prints_the_reference_alone(shell: Shell, fake: FakeApiServer) -> None:
    result = shell("run", "-d", "--", "true")
    assert (result.code, result.out) == (0, "vision/1\n")


def test_json_of_a_run_has_the_reference_to_type(shell: Shell, fake: FakeApiServer) -> None:
    assert shell("run", "-d", "--json", "--", "true").json()["ref"] == "vision/1"
    job = f"/v1/jobs/job_{2:026d}"
    fake.answers["GET", job] = job_view(number=2, status="running")
    fake.streams[f"{job}/logs/stream"] = [[sse("end", {"status": "succeeded", "exit_code": 0})]]
    document = [json.loads(text) for text in shell("run", "--json", "--", "true").out.splitlines()]
    assert document[0] == {"event": "submitted", "ref": "vision/2", "job_id": f"job_{2:026d}"}
    submit_array(fake, ["queued"])
    assert shell("run", "-d", "--json", "--array", "1", "--", "true").json()["ref"] == "arr_1"


def submit_array(fake: FakeApiServer, statuses: list[str]) -> None:
    """The next submit is an array whose elements are in these states."""
    arguments = "n1: rank 0 exited with code 4\noh no\x1b[31m"
    jobs = [
        job_view(
            20 + index,
            status,
            name="job-20",
            array={"id": "arr_1", "index": index, "size": len(statuses)},
            because=arguments if status == "failed" else "",
        )
        for index, status in enumerate(statuses)
    ]
    fake.answers["POST", "/v1/jobs"] = (201, {"jobs": jobs, "count": len(jobs), "array_id": "arr_1"})
    fake.answers["GET", "/v1/jobs"] = {"items": jobs[::-1], "next_cursor": None}


def test_first_failed_element_prints_its_output_and_others_are_named(
    shell: Shell, fake: FakeApiServer
) -> None:
    submit_array(fake, ["succeeded", "failed", "failed"])
    result = shell("run", "--array", "3", "--", "true")
    assert result.code == 1
    assert result.err == (
        "-- job-20: 3 jobs submitted, from vision/20; `shoal logs 'job-20[0]'` prints the output of one\n"
        "-- 3 of 3 done, 2 failed\n"
        "-- job-20[1] (vision/21) failed: n1: rank 0 exited with code 4\n"
        "     oh no\n"
        "     its output: `shoal logs vision/21`\n"
        "-- job-20[2] (vision/22) failed: n1: rank 0 exited with code 4\n"
    )


def name_array(fake: FakeApiServer, statuses: list[str]) -> None:
    """`job-20` is an array whose elements are in these states."""
    submit_array(fake, statuses)
    listed = fake.answers["GET", "/v1/jobs"]
    reply = {"items": listed["items"][:1], "next_cursor": None, "array_id": "arr_1"}
    fake.answers["GET", "/v1/jobs"] = lambda request: reply if "ref" in request.query else listed


def test_retry_of_an_array_leaves_what_succeeded_or_is_open_alone(shell: Shell, fake: FakeApiServer) -> None:
    name_array(fake, ["succeeded", "failed", "running", "cancelled"])
    for number in range(20, 24):
        path = f"/v1/jobs/job_{number:026d}/retry"
        fake.answers["POST", path] = job_view(number, "queued", name="job-20")
    assert shell("retry", "job-20").out == "vision/21: queued\nvision/23: queued\n"
    name_array(fake, ["succeeded", "running"])
    refused = shell("retry", "job-20")
    assert refused.code == 3
    assert "no element of array `job-20` has failed or was cancelled" in refused.err


def test_at_most_ten_failed_elements_are_named(shell: Shell, fake: FakeApiServer) -> None:
    submit_array(fake, ["failed"] * 12)
    errors = shell("run", "--array", "12", "--", "true").err.splitlines()
    assert len([text for text in errors if "] (vision/" in text]) == 10
    assert errors[-1] == "-- and 2 more: `shoal queue --all --name job-20`"


def test_successful_array_prints_nothing_more(shell: Shell, fake: FakeApiServer) -> None:
    submit_array(fake, ["succeeded", "succeeded"])
    result = shell("run", "--array", "2", "--", "true")
    assert result.code == 0
    assert result.err.endswith("-- 2 of 2 done\n")


def test_last_output_of_a_failure_has_lines_of_its_own(shell: Shell, fake: FakeApiServer) -> None:
    job = f"/v1/jobs/job_{1:026d}"
    because = "n1: rank 0 exited with code 2\npython: can't open file 'nope.py'"
    fake.answers["GET", job] = job_view(number=1, status="running")
    end = {"status": "failed", "exit_code": 2, "because": because}
    fake.streams[f"{job}/logs/stream"] = [[sse("end", end)]]
    errors = shell("run", "--", "python", "nope.py").err
    assert errors.endswith(
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
    shell: Shell, fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch, typed: tuple[str, ...]
) -> None:
    arguments = io.TextIOWrapper(io.BytesIO(b"name: piped\nrun: python train.py\n"))
    monkeypatch.setattr("sys.stdin", arguments)
    assert shell("run", *typed).code == 0
    spec = next(r for r in fake.requests if r.method == "POST").json()["spec"]
    assert spec["name"] == ("other" if "other" in typed else "piped")
    assert spec["run"] == ("true" if "--" in typed else "python train.py")


def test_dash_as_a_flags_value_is_not_a_job_file(shell: Shell) -> None:
    assert "standard input" not in shell("run", "--name", "-", "--", "true").err


def test_a_run_from_an_empty_directory_is_one_request(shell: Shell, fake: FakeApiServer) -> None:
    assert shell("run", "-d", "--", "true").code == 0
    assert [(request.method, request.path) for request in fake.requests] == [("POST", "/v1/jobs")]


def test_a_directory_the_server_knows_is_not_sent_again(
    shell: Shell, fake: FakeApiServer, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    for _ in range(2):
        assert shell("run", "-d", "-p", "vision", "--", "true").code == 0
    assert [request.method for request in fake.requests] == ["POST", "PUT", "POST", "POST"]
    assert fake.requests[1].query == {"project": ["vision"]}


@pytest.mark.parametrize("flags", [("--workdir", ""), ("--workdir", "", "--priority", "-5")])
def test_an_empty_workdir_sends_nothing_along(
    shell: Shell, fake: FakeApiServer, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").touch()
    assert shell("run", "-d", *flags, "--", "true").code == 0
    (body,) = [request.json() for request in fake.requests]
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


def test_interrupting_a_run_detaches_and_prints_how_to_follow_again(
    shell: Shell, fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch
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
    shell: Shell, fake: FakeApiServer, tmp_path: Path
) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "job.yaml").write_text("name: a\nrun: python a.py\nresources: {gpus: 2}\n")
    (tmp_path / "elsewhere").write_text("not sent")
    assert shell("run", "jobs/job.yaml", "-d", "--name", "b").code == 0
    assert shell("run", "jobs/job.yaml", "-d").code == 0
    bodies = [request.json() for request in fake.requests if request.method == "POST"]
    assert [body["spec"]["name"] for body in bodies] == ["b", "b", "a"]
    assert len(fake.paths("PUT")) == 1
    assert bodies[0]["archive"] == bodies[1]["archive"] == fake.paths("PUT")[0].rsplit("/", 1)[1]
    (archive,) = fake.archives.values()
    assert b"job.yaml" in archive
    assert b"elsewhere" not in archive


def test_server_chooses_the_project_if_none_is_named(
    shell: Shell, fake: FakeApiServer, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    assert shell("run", "-d", "--", "true").code == 0
    posted, put, _ = fake.requests
    assert "project" not in {**posted.json(), **posted.json()["flags"], **put.query}
    expected = "which project? You may submit to: a, b"
    fake.answers["POST", "/v1/jobs"] = fake.problem(422, "spec.invalid", expected, hint="add `--project a`")
    result = shell("run", "-d", "--", "true")
    assert (result.code, result.err) == (2, f"error: {expected}\nhint: add `--project a`\n")


def test_attempt_that_will_be_retried_prints_its_reason(shell: Shell, fake: FakeApiServer) -> None:
    job = f"/v1/jobs/job_{1:026d}"
    fake.answers["GET", job] = job_view(number=1, status="running")
    exited = {"epoch": 1, "reason": "exit", "exit_code": 3, "message": "n1: rank 0 exited with code 3\nbye"}
    lost = {"epoch": 2, "reason": "lost", "message": "its supervisor died on n2", "again_in_s": 0.4}
    fake.streams[f"{job}/logs/stream"] = [
        [
            sse("again", {**exited, "again_in_s": 4.9}),
            sse("again", lost),
            sse("line", {**log_line("pip", None), "stream": "s"}),
            sse("line", {**log_line("ours", None), "stream": "e"}),
            sse("end", {"status": "succeeded"}),
        ]
    ]
    result = shell("run", "--", "true")
    assert "-- attempt 1 failed: n1: rank 0 exited with code 3; again in 5 s\n" in result.err
    assert "-- attempt 2 lost: its supervisor died on n2\n" in result.err
    assert result.out == "[setup] pip\n[shoal] ours\n"


def test_unreachable_server_error_says_how_to_follow_again(
    shell: Shell, fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = f"/v1/jobs/job_{1:026d}"
    fake.answers["GET", job] = job_view(number=1, status="running")
    fake.answers["GET", f"{job}/logs/stream"] = fake.problem(503, "server.unreachable", "away")
    monkeypatch.setattr(Transport, "pauses", lambda *_, **__: iter([True, True]))
    result = shell("run", "--", "true")
    assert result.code == 6
    expected = f"-- no answer from {fake.url}; the job keeps running; trying again for 60 s\n"
    assert result.err.count(expected) == 1
    assert "`shoal logs -f vision/1` follows the job again" in result.err


def test_why_of_a_running_job_prints_the_servers_sentence(shell: Shell, fake: FakeApiServer) -> None:
    reply = {"status": "running", "explanation": None, "sentence": "vision/17 is running on n1"}
    fake.answers["GET", f"/v1/jobs/{JOB_ID}/why"] = reply
    assert shell("why", "17").out == "vision/17 is running on n1\n"


def an_array(fake: FakeApiServer) -> None:
    place = {"array_id": "arr_1", "size": 2}
    items = [job_view(n, "stopping", array={**place, "index": n}) for n in (17, 16)]

    def listed(request: Any) -> Any:
        if "ref" in request.query:
            return {"items": items[:1], "next_cursor": None, "array_id": "arr_1"}
        return {"items": items, "next_cursor": None}

    fake.answers["GET", "/v1/jobs"] = listed
    fake.answers["POST", "/v1/arrays/arr_1/stop"] = {"array_id": "arr_1", "count": 2, "jobs": items}


def test_the_name_of_an_array_stops_all_of_it(shell: Shell, fake: FakeApiServer) -> None:
    an_array(fake)
    assert shell("stop", "sweep").out == "vision/16: stopping\nvision/17: stopping\n"
    assert fake.paths("POST") == ["/v1/arrays/arr_1/stop"]


def test_the_element_that_stands_for_an_array_is_named(shell: Shell, fake: FakeApiServer) -> None:
    an_array(fake)
    fake.answers["GET", f"/v1/jobs/{JOB_ID}/why"] = {"status": "running", "sentence": "it runs"}
    result = shell("why", "sweep")
    assert result.out == "it runs\n"
    assert result.err == "-- sweep is an array of 2; this is its newest element, vision/17\n"


def test_every_mistake_in_a_job_is_printed_and_nothing_is_sent(
    shell: Shell, fake: FakeApiServer, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text("run: x\nresources:\n  gpu: 2\nprioritty: 3\n")
    result = shell("run", "job.yaml")
    assert result.code == 2
    assert len([text for text in result.err.splitlines() if text.startswith("error: job.yaml:")]) == 2
    assert not fake.requests


def test_a_program_without_dashes_is_explained(shell: Shell) -> None:
    result = shell("run", "python", "train.py")
    assert result.code == 2
    result = shell("run", "python")
    assert "a program comes after `--`" in result.err


def test_a_missing_secret_is_named_before_anything_is_sent(shell: Shell, fake: FakeApiServer) -> None:
    result = shell("run", "--secret", "HF_TOKEN_X", "--", "true")
    assert result.code == 2
    assert "`HF_TOKEN_X` is not set" in result.err
    assert "POST" not in {request.method for request in fake.requests}


def test_secrets_travel_beside_the_spec(
    shell: Shell, fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN_X", "s3cret")
    shell("run", "-d", "--secret", "HF_TOKEN_X", "--", "true")
    body = next(request for request in fake.requests if request.method == "POST").json()
    assert body["secrets"] == {"HF_TOKEN_X": "s3cret"}
    assert "s3cret" not in json.dumps(body["flags"])
