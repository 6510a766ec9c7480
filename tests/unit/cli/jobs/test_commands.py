"""Each command sends the right request and prints the reply."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from shoal.cli.jobs import follow
from shoal.cli.jobs.logs import clock_text
from tests.support.fakes.api_server import FakeApiServer, Shell, job_view, log_line, sse

JOB_ID = f"job_{17:026d}"
LOGS = f"/v1/jobs/{JOB_ID}/logs"


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("logs", "`shoal logs` needs JOB"),
        ("logs a b", "`b` is one word too many"),
        ("logs a --tail x", "`--tail` takes a whole number, not `x`"),
        ("logs a --tail", "`--tail` needs a value"),
        ("drill partition a", "`shoal drill partition` needs `--for`"),
        ("drill kill-rank", "`shoal drill kill-rank` needs JOB"),
        ("cluster remove", "`shoal cluster remove` needs HOSTS"),
        ("rollout", "`shoal rollout` needs SERVICE"),
        ("reserve --for -1h --maintenance", "`--for` needs a value; `-1h` is none"),
        ("run --gpsu 3", "unknown option `--gpsu`; did you mean `--gpus`?"),
        ("logs a -z", "unknown option `-z`"),
        ("logs a -r 1 -r 2", "`-r` is given more than once"),
        ("completion csh", "`SHELL` is one of `bash`, `zsh`, `fish`, not `csh`; did you mean `zsh`?"),
        ("queue --json=3", "`--json` takes no value"),
        ("statu", "unknown command `statu`; did you mean `status`?"),
    ],
)
def test_parser_messages_become_plain_sentences(shell: Shell, typed: str, sentence: str) -> None:
    result = shell(*typed.split())
    assert result.code == 2
    assert result.err.splitlines()[0] == f"error: {sentence}"
    assert ("`shoal queue` lists jobs" in result.err) == sentence.endswith("needs JOB")


def test_tail_prints_the_requested_number_of_lines_while_new_ones_arrive(
    shell: Shell, fake: FakeApiServer
) -> None:
    fake.answers["GET", f"/v1/jobs/{JOB_ID}"] = job_view(status="running")
    last = {"items": [log_line("c", 0), log_line("d", 1)], "next_cursor": "1.64-64", "is_complete": False}
    fake.answers["GET", LOGS] = last
    assert shell("logs", JOB_ID, "-n", "2").out == "[0] c\n[1] d\n"


def test_logs_of_a_job_that_waits_say_so(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["GET", f"/v1/jobs/{JOB_ID}"] = job_view()
    fake.answers["GET", LOGS] = {"items": [], "next_cursor": None, "is_complete": False}
    expected = "-- vision/17 waits and has not started: `shoal why vision/17` prints the reason\n"
    assert shell("logs", JOB_ID).err == expected
    fake.streams[f"{LOGS}/stream"] = [[sse("end", {"status": "succeeded"})]]
    assert shell("logs", "-f", JOB_ID).err == expected


def test_logs_of_a_job_without_output_say_so(shell: Shell, fake: FakeApiServer) -> None:
    attempts = [{"epoch": 1, "nodes": ["n1"]}]
    fake.answers["GET", LOGS] = {"items": [], "next_cursor": None, "is_complete": True}
    for status, expected in (
        ("running", "no output yet"),
        ("failed", "it printed nothing, or its log is no longer here"),
    ):
        fake.answers["GET", f"/v1/jobs/{JOB_ID}"] = job_view(status=status, attempts=attempts)
        assert shell("logs", JOB_ID).err == f"-- vision/17: {expected}\n"
    assert (
        shell("logs", JOB_ID, "--rank", "0").err
        == "-- vision/17: rank 0 printed nothing, or its log is no longer here\n"
    )


def test_job_waiting_in_its_clusters_queue_is_not_reported_as_started(
    shell: Shell, fake: FakeApiServer
) -> None:
    fake.answers["GET", f"/v1/jobs/{JOB_ID}"] = job_view(status="starting")
    waits = ["Slurm job 5 is PENDING (Resources)"]
    placed = {"epoch": 1, "nodes": ["n2"], "waits": waits}
    end = sse("end", {"status": "cancelled"})
    fake.streams[f"{LOGS}/stream"] = [
        [sse("placed", placed), end],
        [sse("placed", {**placed, "epoch": 2}), end],
    ]
    expected = "placed on n2, waits there: Slurm job 5 is PENDING (Resources)\n"
    assert shell("logs", "-f", JOB_ID).err == f"-- {expected}"
    assert shell("logs", "-f", JOB_ID).err == f"-- attempt 2 {expected}"


def test_queue_says_why_a_placed_job_does_not_run(
    shell: Shell, fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [job_view(status="starting", nodes=["n2"])]
    fake.answers["GET", "/v1/jobs"] = {"items": jobs, "next_cursor": None}
    arguments = "n2: Slurm job 5 is PENDING (Resources)"
    facts = {"in_short": "slurm: PENDING (Resources)"}
    explanation = {"why": "not_begun", "sentence": "it was placed", "details": [arguments], "facts": facts}
    why = {"job": jobs[0], "status": "starting", "explanation": explanation, "sentence": "it was placed"}
    fake.answers["GET", f"/v1/jobs/{JOB_ID}/why"] = why
    monkeypatch.setenv("COLUMNS", "140")
    assert arguments in shell("queue").out
    monkeypatch.setenv("COLUMNS", "80")
    assert "slurm: PENDING (Resources)" in shell("queue").out
    fake.answers["GET", f"/v1/jobs/{JOB_ID}/why"] = {
        **why,
        "explanation": None,
        "sentence": "17 is starting on n2",
    }
    assert "17 is starting on n2" not in shell("queue").out


def test_missing_stacks_are_reported_for_the_requested_rank_and_attempt_only(
    shell: Shell, fake: FakeApiServer
) -> None:
    job = job_view(status="running", attempts=[{"nodes": ["n1", "n2"]}])
    fake.answers["GET", f"/v1/jobs/{JOB_ID}"] = job
    fake.answers["GET", LOGS] = {"items": [], "next_cursor": None, "is_complete": True}
    none = "they are saved when ranks hang"
    newest = f"no stacks in its newest attempt; {none}; `--attempt N` shows an earlier one's\n"
    assert shell("logs", JOB_ID, "--stacks").err == f"-- {JOB_ID}: {newest}"
    result = shell("logs", JOB_ID, "--stacks", "--rank", "1", "--attempt", "2")
    assert result.err == f"-- {JOB_ID}: no stacks of rank 1 in attempt 2; {none}\n"


def test_rank_outside_the_job_is_refused(shell: Shell, fake: FakeApiServer) -> None:
    job = job_view(status="running", attempts=[{"epoch": 1, "nodes": ["n1"]}, {"epoch": 2, "nodes": []}])
    job["request"]["ranks_per_node"] = 2
    fake.answers["GET", f"/v1/jobs/{JOB_ID}"] = job
    fake.answers["GET", LOGS] = {"items": [log_line("hi", 1)], "next_cursor": None, "is_complete": True}
    refused = shell("logs", JOB_ID, "--rank", "7")
    assert refused.code == 2
    assert "`--rank 7`: job vision/17 has 2 ranks, 0 to 1" in refused.err
    assert shell("logs", JOB_ID, "--rank", "1").out == "[1] hi\n"


def test_new_token_prints_its_scope_and_the_reason(shell: Shell, fake: FakeApiServer) -> None:
    created = {"id": "tok_1", "scope": "admin", "project": None, "text": "shl_x"}
    fake.answers["POST", "/v1/tokens"] = (201, created)
    result = shell("token", "create", "--user", "vic")
    assert result.out == "shl_x\n"
    assert "scope admin, as your own token has: it may do all that vic may" in result.err
    created["scope"], created["project"] = "viewer", "vision"
    assert "scope viewer in project vision alone\n" in shell("token", "create", "--scope", "viewer").err


def test_names_are_not_cut_in_a_pipe(
    shell: Shell, fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "a-name-that-is-much-longer-than-its-column-in-a-table-of-eighty-columns"
    fake.answers["GET", "/v1/jobs"] = {"items": [job_view(status="running", name=name)], "next_cursor": None}
    assert name not in shell("queue").out
    monkeypatch.delenv("COLUMNS")
    assert name in shell("queue").out


def test_why_of_a_job_that_ended_shows_its_attempts(
    shell: Shell, fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        "ATTEMPT  NODES  BEGAN (UTC)     RAN    HOW IT ENDED\n"
        "1        n1+1   01-15 08:01:40  12s    lost: its supervisor died on n2\n"
        "2        n1     01-15 08:02:00  1m10s  failed: n1: rank 0 ran out of memory\n"
        "took 3m10s from submit to end; exit code 137\n"
        "1 of 3 failures used; 1 more lost by the cluster, which are not counted\n"
        "checkpoint: /srv/ckpt\n"
    )
    assert shell("why", JOB_ID, "--json").json() == answer
    answer["attempts"] = [lost, lost, failed]  # each after a long life, and so the first in a row
    assert "used; 2 more lost by the cluster" in shell("why", JOB_ID).out
    monkeypatch.setenv("COLUMNS", "60")
    assert "lost: its supervisor\n" + " " * 39 + "died on n2\n" in shell("why", JOB_ID).out, "nothing is cut"
    answer["status"] = "queued"
    answer["attempts"] = [{**failed, "ended_at": None, "started_at": None, "state": "queued"}]
    assert shell("why", JOB_ID).out == "vision/17 failed: oom\n"


def test_why_answers_when_the_server_is_too_busy_to_predict(shell: Shell, fake: FakeApiServer) -> None:
    def why(request: Any) -> Any:
        if "predict" in request.query:
            return 429, {"detail": "8 questions wait", "code": "limit.reached", "hint": "ask again"}
        return reply

    reply = {"job": job_view(), "status": "queued", "explanation": {"why": "behind"}, "sentence": "waits"}
    fake.answers["GET", f"/v1/jobs/{JOB_ID}/why"] = why
    result = shell("why", JOB_ID)
    assert (result.code, result.out) == (0, "waiting: waits\n")
    assert result.err == "note: no predicted start: 8 questions wait; ask again\n"


def test_why_says_which_predictions_were_skipped(shell: Shell, fake: FakeApiServer) -> None:
    outlook = {
        "sentence": "starts by 08:18 UTC",
        "changes": [],
        "not_looked": "no changes were tried: too many",
    }
    reply = {"job": job_view(), "status": "queued", "explanation": {"why": "behind"}, "sentence": "waits"}
    fake.answers["GET", f"/v1/jobs/{JOB_ID}/why"] = {**reply, "outlook": outlook}
    assert shell("why", JOB_ID).out.splitlines()[1:] == [
        "outlook: starts by 08:18 UTC",
        "note: no changes were tried: too many",
    ]


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/New_York"])
def test_all_screens_print_utc_in_any_time_zone(
    shell: Shell, fake: FakeApiServer, zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = 1_800_000_100.0
    event = {"seq": 1, "at": at, "kind": "node.ready", "actor": "user:ana", "project": None, "job_id": None,
             "node": "n1", "data": {}, "hash": "cd"}  # fmt: skip
    fake.answers["GET", "/v1/events"] = {"items": [event], "next_cursor": None}
    ran = {"attempt_id": "att_1", "state": "running", "epoch": 2, "nodes": ["n1"], "started_at": at,
           "ended_at": None}  # fmt: skip
    reply = {"job": job_view(), "status": "running", "sentence": "runs", "attempts": [ran], "max_failures": 1}
    fake.answers["GET", f"/v1/jobs/{JOB_ID}/why"] = reply
    window = {"id": "win_1", "kind": "maintenance", "nodes": ["n1"], "from_at": at, "until_at": at + 60}
    fake.answers["GET", "/v1/windows"] = {"items": [window], "next_cursor": None}
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert "01-15 08:01:40Z" in shell("events").out
        assert "BEGAN (UTC)" in shell("why", JOB_ID).out
        assert "01-15 08:01:40" in shell("why", JOB_ID).out
        assert "15 Jan 08:01" in shell("reservations").out
        assert clock_text(at) == "08:01:40.000Z"
    finally:
        monkeypatch.setenv("TZ", "UTC")
        time.tzset()


def test_events_show_the_newest_unless_a_start_is_given(shell: Shell, fake: FakeApiServer) -> None:
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
    assert len(fake.requests) == 1
    assert [event["seq"] for event in shell("events", "-n", "2", "--after", "7", "--json").json()] == [8, 9]


@pytest.mark.parametrize(
    "kind,data,expected",
    [
        ("service.released", {"release": 2, "spec": "{}", "model": "m@3"}, "served, release 2 by ana: m@3"),
        ("service.scaled", {"min": 2, "max": 4}, "scaled to 2..4 by ana"),
        ("rollout.undone", {}, "its rollout undone by ana"),
        ("rollout.rolling", {"from": 1, "to": 2, "step": 0}, "rolls over to release 2 by ana"),
    ],
)
def test_events_of_services_say_what_was_changed_and_by_whom(
    shell: Shell, fake: FakeApiServer, kind: str, data: dict[str, Any], expected: str
) -> None:
    event = {"seq": 1, "at": 0.0, "kind": kind, "actor": "user:ana", "project": "lab"}
    item = {**event, "data": {"service": "chat", **data}}
    fake.answers["GET", "/v1/events"] = {"items": [item], "next_cursor": None}
    assert shell("events").out.rstrip().endswith(f"lab        service chat {expected}")


def test_logs_print_rank_and_text_and_neutralise_escapes(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["GET", f"/v1/jobs/{JOB_ID}"] = job_view(status="running")
    items = [log_line("loss 1.0\x1b]0;x\x07"), log_line("setup", None), log_line("b\r30%\r100%", 11)]
    fake.answers["GET", LOGS] = {"items": items, "next_cursor": None, "is_complete": True}
    assert shell("logs", "17").out == "[0] loss 1.0\n[shoal] setup\n[11] 100%\n"
    assert shell("logs", "17", "-t").out.startswith("08:00:00.250Z [0] loss")
    assert [json.loads(text)["rank"] for text in shell("logs", "17", "--json").out.splitlines()] == [
        0,
        None,
        11,
    ]


def test_logs_follow_every_page(shell: Shell, fake: FakeApiServer) -> None:
    pages = [
        {"items": [log_line("one")], "next_cursor": "c1", "is_complete": False},
        {"items": [log_line("two")], "next_cursor": "c2", "is_complete": True},
        {"items": [], "next_cursor": "c2", "is_complete": True},
    ]
    fake.answers["GET", LOGS] = pages
    fake.answers["GET", f"/v1/jobs/{JOB_ID}"] = job_view(status="running")
    assert shell("logs", "17").out == "[0] one\n[0] two\n"


def test_log_lines_without_a_rank_name_their_node_if_there_are_several(
    shell: Shell, fake: FakeApiServer
) -> None:
    attempt = {"epoch": 1, "nodes": ["n1", "n2"]}
    fake.answers["GET", f"/v1/jobs/{JOB_ID}"] = job_view(status="running", attempts=[attempt])
    items = [log_line("group 1 begins", None), {**log_line("pip", None), "stream": "s"}, log_line("loss", 1)]
    fake.answers["GET", LOGS] = {"items": items, "next_cursor": None, "is_complete": True}
    expected = "[shoal n1] group 1 begins\n[setup n1] pip\n[1] loss\n"
    assert shell("logs", JOB_ID).out == expected
    lines = [sse("line", item) for item in items]
    fake.streams[f"{LOGS}/stream"] = [[sse("attempt", attempt), *lines, sse("end", {"status": "succeeded"})]]
    assert shell("logs", "-f", JOB_ID).out == expected


@pytest.mark.parametrize("flag", ["--tail=5", "--follow"])
def test_logs_of_the_newest_attempt_name_the_command_for_earlier_ones(
    shell: Shell, fake: FakeApiServer, flag: str
) -> None:
    attempts = [{"epoch": epoch, "nodes": ["n1"]} for epoch in (1, 2, 3)]
    fake.answers["GET", LOGS] = {"items": [log_line("hi")], "next_cursor": None, "is_complete": True}
    fake.streams[f"{LOGS}/stream"] = [[sse("end", {"status": "succeeded"})]] * 2
    fake.answers["GET", f"/v1/jobs/{JOB_ID}"] = job_view(status="running", attempts=attempts[:2])
    one_earlier = "-- this is attempt 2; there is one before; `shoal logs vision/17 --attempt 1` shows it\n"
    assert shell("logs", JOB_ID, flag).err == one_earlier
    fake.answers["GET", f"/v1/jobs/{JOB_ID}"] = job_view(status="running", attempts=attempts)
    two = "-- this is attempt 3; there are 2 before; `shoal logs vision/17 --attempt 2` shows the last\n"
    assert shell("logs", JOB_ID, flag).err == two
    assert shell("logs", JOB_ID, "--attempt", "1").err == ""


def test_logs_of_a_preempted_job_say_that_it_waits_again(shell: Shell, fake: FakeApiServer) -> None:
    attempts = [{"epoch": 1, "nodes": ["n1"]}, {"epoch": 2, "nodes": []}]
    fake.answers["GET", f"/v1/jobs/{JOB_ID}"] = job_view(attempts=attempts)
    fake.answers["GET", LOGS] = {"items": [], "next_cursor": None, "is_complete": False}
    assert shell("logs", JOB_ID).err == (
        "-- this is attempt 2; there is one before; `shoal logs vision/17 --attempt 1` shows it\n"
        "-- vision/17 waits again: `shoal why vision/17` prints the reason\n"
    )


def test_restarts_in_place_are_not_counted_as_attempts(shell: Shell, fake: FakeApiServer) -> None:
    ended = {
        "epoch": 1,
        "nodes": ["n1"],
        "state": "ended",
        "started_at": 0.0,
        "ended_at": 9.0,
        "rendezvous_round": 2,
    }
    job = job_view(status="failed", ended_at=1_800_000_090.0, failures=3)
    fake.answers["GET", f"/v1/jobs/{JOB_ID}/why"] = {
        "job": job, "status": "failed", "explanation": None, "sentence": "vision/17 failed",
        "attempts": [ended], "max_failures": 3, "checkpoint_dir": None,
    }  # fmt: skip
    output = shell("why", JOB_ID).out.splitlines()
    assert output[-1] == "3 of 3 failures used; restarts of ranks in place count too"


@pytest.mark.parametrize(
    ("world", "reason", "line"),
    [
        ({"size": 4, "ranks": 4, "is_whole": True}, "succeeded", None),
        ({"size": 2, "ranks": 4, "is_whole": False}, "succeeded", "of its 4 ranks has 2 and does not span"),
        (None, "succeeded", "its 4 ranks formed no process group that Shoal saw"),
        (None, "exit", None),
    ],
)
def test_why_says_whether_ranks_found_each_other(
    shell: Shell, fake: FakeApiServer, world: dict[str, Any] | None, reason: str, line: str | None
) -> None:
    job = job_view(status="succeeded", ended_at=1_800_000_090.0)
    job["request"]["ranks_per_node"] = 2
    ended = {
        "epoch": 1, "nodes": ["n1", "n2"], "state": "ended", "started_at": 0.0, "ended_at": 9.0,
        "reason": reason, "world": world,
    }  # fmt: skip
    fake.answers["GET", f"/v1/jobs/{JOB_ID}/why"] = {
        "job": job, "status": "succeeded", "explanation": None, "sentence": "vision/17 succeeded",
        "attempts": [ended], "max_failures": 1, "checkpoint_dir": None,
    }  # fmt: skip
    output = [shown for shown in shell("why", JOB_ID).out.splitlines() if shown.startswith("world: ")]
    assert len(output) == (line is not None)
    assert line is None or line in output[0]


@pytest.mark.parametrize("arguments", [("17",), ("--job", "17"), (JOB_ID,)])
def test_events_of_one_job_need_only_its_name(
    shell: Shell, fake: FakeApiServer, arguments: tuple[str, ...]
) -> None:
    fake.answers["GET", "/v1/events"] = {"items": [], "next_cursor": None}
    assert shell("events", *arguments).code == 0
    assert fake.requests[-1].query["job"] == [JOB_ID]


def test_queue_requests_open_jobs_by_default(shell: Shell, fake: FakeApiServer) -> None:
    shell("queue", "--json")
    shell("queue", "--all", "--json", "-p", "vision")
    assert fake.requests[0].query["status"] == ["queued", "starting", "running", "stopping"]
    assert "status" not in fake.requests[1].query
    assert fake.requests[1].query["project"] == ["vision"]


def test_unknown_status_error_lists_the_valid_ones(shell: Shell, fake: FakeApiServer) -> None:
    result = shell("queue", "--status", "faild")
    assert result.code == 2
    for word in ("faild", "queued", "cancelled", "did you mean `failed`?"):
        assert word in result.err
    assert not fake.requests
    assert shell("queue", "--status", "failed", "--status", "running").code == 0
    assert fake.requests[0].query["status"] == ["failed", "running"]


@pytest.mark.parametrize("argv", [("queue",), ("events",), ("run", "-d")])
def test_unknown_project_is_named_in_the_error(
    shell: Shell, fake: FakeApiServer, argv: tuple[str, ...]
) -> None:
    nothing = fake.problem(404, "not_found", "no such thing, or one you may not see")
    for place in (("GET", "/v1/jobs"), ("POST", "/v1/jobs"), ("GET", "/v1/events")):
        fake.answers[place] = nothing
    result = shell(*argv, "-p", "nope", *(("--", "true") if argv[0] == "run" else ()))
    assert result.code == 4
    assert result.err.startswith("error: no project `nope`, or one you may not see\n")


def test_a_number_in_two_projects_lists_what_to_type(shell: Shell, fake: FakeApiServer) -> None:
    jobs = [job_view(17), job_view(17, ref="nlp/17", project="nlp")]
    fake.answers["GET", "/v1/jobs"] = {"items": jobs, "next_cursor": None}
    result = shell("logs", "17")
    assert result.code == 2
    assert result.err == "error: `17` is a job in 2 projects\nhint: type one of `vision/17`, `nlp/17`\n"


def test_stopping_what_has_ended_says_how_it_ended(shell: Shell, fake: FakeApiServer) -> None:
    ended = job_view(status="failed", because="n1: rank 0 exited with code 1\noh no")
    fake.answers["POST", f"/v1/jobs/{JOB_ID}/stop"] = ended
    result = shell("stop", JOB_ID)
    expected = "vision/17: had ended already: failed (n1: rank 0 exited with code 1: oh no)\n"
    assert (result.code, result.out) == (0, expected)
    fake.answers["POST", f"/v1/jobs/{JOB_ID}/stop"] = job_view(status="cancelled", because="stopped by ana")
    assert shell("stop", JOB_ID).out == "vision/17: cancelled (stopped by ana)\n"


def test_followed_events_keep_the_filter(
    shell: Shell, fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.cli.events.event_line", interrupt)
    fake.streams["/v1/events/stream"] = [[sse("event", {"seq": 1, "at": 0.0, "kind": "node.added"})]]
    assert shell("events", "-f", "-p", "vision", "--node", "n1", "--kind", "node.").code == 130
    (seen,) = fake.requests
    assert seen.query == {"project": ["vision"], "node": ["n1"], "kind": ["node."]}


def test_stop_continues_after_a_job_that_cannot_be_stopped(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["POST", "/v1/jobs/job_a/stop"] = fake.problem(409, "state.conflict", "it has ended")
    fake.answers["POST", "/v1/jobs/job_b/stop"] = job_view(status="stopping")
    result = shell("stop", "job_a", "job_b")
    assert result.code == 3
    assert result.out == "vision/17: stopping\n"
    assert "error: it has ended" in result.err


def test_nodes_and_status_say_that_the_cluster_does_not_answer(shell: Shell, fake: FakeApiServer) -> None:
    away = {"since": 7.0, "has_answered": True}
    node = {"name": "n1", "state": "ready", "engine": "slurm", "unanswered": away}
    fake.answers["GET", "/v1/nodes"] = {"items": [node], "next_cursor": None}
    expected = (
        "the Slurm does not answer since 1970-01-01 00:00:07 UTC; what is shown of its nodes is as of then"
    )
    assert shell("nodes").err == f"-- {expected}\n"
    assert shell("nodes", "--json").err == ""
    fake.answers["GET", "/v1/nodes"] = {"items": [{**node, "unanswered": None}], "next_cursor": None}
    assert shell("nodes").err == ""
    status_view = {"started_at": 0.0, "engine": "slurm", "unanswered": {**away, "why": "ssh to a: refused"}}
    fake.answers["GET", "/v1/status"] = status_view
    assert f"cluster  {expected} (ssh to a: refused)" in shell("status").out.splitlines()


def test_status_says_that_services_are_not_at_their_port(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["GET", "/v1/status"] = {"started_at": 0.0, "taken_service_port": 7463}
    expected = "port 7463 is another program's; services have another one, which `shoal services` shows"
    assert f"services {expected}" in shell("status").out.splitlines()


def test_a_control_plane_that_was_never_answered_says_that_what_it_shows_is_older(
    shell: Shell, fake: FakeApiServer
) -> None:
    away = {"since": 7.0, "has_answered": False}
    node = {"name": "n1", "state": "ready", "engine": "slurm", "unanswered": away}
    fake.answers["GET", "/v1/nodes"] = {"items": [node], "next_cursor": None}
    never = "the Slurm has not answered this control plane, which asks since 1970-01-01 00:00:07 UTC"
    assert shell("nodes").err == f"-- {never}; what is shown of its nodes is older\n"
    del away["has_answered"]
    assert "does not answer since" in shell("nodes").err, "a server that does not say is believed to know"


def test_nodes_name_silent_jobs_on_nodes_their_cluster_calls_ready(shell: Shell, fake: FakeApiServer) -> None:
    node = {"name": "n1", "state": "ready", "silent_jobs": ["vision/17"]}
    fake.answers["GET", "/v1/nodes"] = {"items": [node, {**node, "is_alive": False}], "next_cursor": None}
    assert shell("nodes").err == "-- no sign of life from jobs on n1: see `shoal why vision/17`\n"


def test_unknown_confinement_has_no_column(shell: Shell, fake: FakeApiServer) -> None:
    nodes = [{"name": name, "state": "ready", "confinement": "unknown"} for name in ("n1", "n2")]
    fake.answers["GET", "/v1/nodes"] = {"items": nodes, "next_cursor": None}
    assert shell("nodes").out.splitlines()[0].split() == ["NODE", "POOL", "STATE", "GPUS", "CPUS", "MEMORY"]
    nodes[1]["confinement"] = "cgroup2"
    assert [line.split()[-1] for line in shell("nodes").out.splitlines()] == [
        "CONFINEMENT",
        "unknown",
        "cgroup2",
    ]


@pytest.mark.parametrize(
    ("argv", "path"),
    [
        (("drain", "n1", "--because", "bad NVLink"), "/v1/nodes/n1/drain"),
        (("nodes", "drain", "n1", "-m", "bad NVLink"), "/v1/nodes/n1/drain"),
        (("resume", "n1"), "/v1/nodes/n1/resume"),
        (("nodes", "cordon", "n1"), "/v1/nodes/n1/cordon"),
    ],
)
def test_node_commands_send_their_reason(
    shell: Shell, fake: FakeApiServer, argv: tuple[str, ...], path: str
) -> None:
    fake.answers["POST", path] = {"name": "n1", "state": "draining", "is_alive": True}
    result = shell(*argv)
    assert (result.code, result.out) == (0, "n1: draining\n")
    assert fake.requests[0].json() == {"because": "bad NVLink" if "bad NVLink" in argv else ""}


@pytest.mark.parametrize(
    ("verb", "after", "expected"),
    [
        ("declare-dead", {"state": "dead", "begin_anew": ["lab/10"]}, "declared dead; lab/10 restarts"),
        (
            "declare-dead",
            {"state": "dead", "begin_anew": ["lab/1", "lab/2"]},
            "declared dead; lab/1, lab/2 restart",
        ),
        ("declare-dead", {"state": "dead", "jobs": ["lab/3"], "begin_anew": []}, "declared dead"),
        ("resume", {"state": "ready"}, "resumed, but it takes no work yet: it is silent"),
        (
            "resume",
            {"state": "ready", "takes_work": False, "closed": "drained in Slurm: bad fan"},
            "resumed, but it takes no work yet: drained in Slurm: bad fan",
        ),
        ("resume", {"state": "ready", "is_alive": True}, "ready"),
        ("cordon", {"state": "cordoned"}, "cordoned, and silent"),
        ("cordon", {"state": "cordoned", "is_gone": True}, "cordoned, and gone"),
    ],
)
def test_node_decision_prints_what_was_done_and_what_follows(
    shell: Shell, fake: FakeApiServer, verb: str, after: dict[str, Any], expected: str
) -> None:
    fake.answers["POST", f"/v1/nodes/n1/{verb}"] = {"name": "n1", "is_alive": False, **after}
    assert shell("nodes", verb, "n1").out == f"n1: {expected}\n"


def test_a_node_that_was_declared_dead_is_shown_as_dead(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["GET", "/v1/nodes/n1"] = {"name": "n1", "state": "dead", "by": "ana", "is_alive": False}
    assert "state        dead by ana\n" in shell("nodes", "n1").out


def test_a_broken_audit_chain_exits_1(shell: Shell, fake: FakeApiServer) -> None:
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
def test_failed_end_never_exits_0(end: dict[str, Any], code: int) -> None:
    assert follow.exit_code(end) == code
