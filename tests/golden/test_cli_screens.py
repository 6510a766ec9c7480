"""Screens as they look in a terminal of 80 columns without colour. `SHOAL_GOLDEN=write` renews the files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.control_plane import status as status_command
from shoal.cli.jobs import queue as queue_command
from tests.support.fakes.api_server import FakeApiServer, Shell, job_view, running_fake

FILES = Path(__file__).parent / "cli"
NOW = 1_800_007_500.0

WAITING = {
    "why": "nodes_closed",
    "sentence": "`train-7b` needs 4 nodes with 8 free GPUs; 3 are free in `a100`",
    "details": ['node-07 drained by ana 2 h ago ("bad NVLink")', "node-02, node-05 busy until about 14:20"],
    "hint": "set `nodes: 3..4`, or `shoal resume node-07`",
    "facts": {},
}


OUTLOOK = {
    "basis": "scenarios",
    "earliest": NOW + 725,
    "likely": NOW + 3600,
    "latest": NOW + 11_105,
    "coverage": 0.9,
    "promised_at": None,
    "num_starts": 312,
    "not_looked": None,
    "sentence": "starts by 13:11 UTC, about 11:05 UTC (90 % sure, from 312 starts)",
    "changes": [
        {
            "setting": "nodes: 3..4",
            "sentence": "`nodes: 3..4` would start it now (on 3 nodes)",
            "starts_at": None,
        },
        {"setting": "nodes: 3", "sentence": "`nodes: 3` would start it now", "starts_at": None},
    ],
}


def gpu_nodes() -> list[dict[str, Any]]:
    gpus = [{"index": index, "kind": "A100"} for index in range(8)]
    common = {"pool": "a100", "because": "", "by": "", "cpus": 64.0, "memory_bytes": 512 << 30, "gpus": gpus,
              "gpus_used": 8, "cpus_used": 32.5, "memory_used_bytes": 256 << 30, "is_simulated": False,
              "is_alive": True, "confinement": "cgroup1 bubblewrap uid", "labels": {"rack": "r1"},
              "engine": "local", "jobs": ["vision/12"]}  # fmt: skip
    return [
        {"name": "node-01", "state": "ready", **common},
        {"name": "node-02", "state": "ready", **common, "is_alive": False},
        {
            "name": "node-07",
            "state": "draining",
            **common,
            "because": "bad NVLink",
            "by": "ana",
            "gpus_used": 0,
        },
        {
            "name": "node-08",
            "state": "ready",
            **common,
            "is_alive": False,
            "takes_work": False,
            "closed": "drained in Slurm: bad fan",
        },
        {"name": "laptop", "state": "ready", **common, "gpus": [], "is_simulated": True, "confinement": ""},
        {"name": "node-09", "state": "ready", **common, "is_alive": False, "is_gone": True, "gpus_used": 0},
    ]


def projects() -> list[dict[str, Any]]:
    """A tree in which somebody borrows, one below a parent that the caller may not see, and one of CPUs."""
    plain = {"role": "member", "parent": None, "quota": None, "borrow": None, "limit": None, "weight": 1.0,
             "open_jobs": 3, "max_open_jobs": 10_000, "max_jobs_per_day": 100_000, "max_priority": 100,
             "max_upload_bytes": 256 << 20,
             "standing": None, "held": {"gpus": 0, "cpus": 2.5}, "created_at": NOW}  # fmt: skip
    gpus = {"gpus": 64, "cpus": None}
    research = {"limit": {"gpus": 128, "cpus": None}, "held": {"gpus": 96, "cpus": 400.0}, "standing": 1.2}
    vision = {"quota": gpus, "borrow": {"gpus": 32, "cpus": None}, "weight": 2.0, "standing": 1.0625}
    return [
        {"name": "audio", **plain, "role": None, "parent": "research", "quota": gpus, "standing": 0.0},
        {"name": "default", **plain},
        {"name": "ops", **plain, "parent": "hidden", "limit": {"gpus": None, "cpus": 64.5}},
        {"name": "research", **plain, **research},
        {"name": "vision", **plain, "parent": "research", **vision, "held": {"gpus": 96, "cpus": 400.0}},
    ]


def windows() -> list[dict[str, Any]]:
    """Maintenance of many nodes, a reservation, and one for a project that the caller may not see."""
    plain = {"by": "ana", "created_at": NOW, "still_there": [], "because": "", "project": None}
    repair = {"id": f"win_{1:026}", "kind": "maintenance", "nodes": [f"node-0{n}" for n in range(1, 6)]}
    ours = {"id": f"win_{2:026}", "kind": "reservation", "nodes": ["node-07"], "project": "vision"}
    theirs = {**ours, "id": f"win_{3:026}", "project": None}
    return [
        {**plain, **repair, "from_at": NOW, "until_at": NOW + 7200, "because": "new NICs and their cables"},
        {**plain, **ours, "from_at": NOW + 9000, "until_at": NOW + 180_000, "because": "demo"},
        {**plain, **theirs, "from_at": NOW + 200_000, "until_at": NOW + 205_400},
    ]


def life_of_a_job() -> list[dict[str, Any]]:
    """What the event log has about one that failed once, was stopped and refused, and a few other things."""
    arguments = "rank 3 exited with code 1\nRuntimeError: NCCL error: unhandled system error"
    share = {"node": "node-02", "gpu_ids": [0, 1], "cpus": 8.0}
    outcome = {"kind": "exited", "node": "node-02", "epoch": 1, "message": arguments, "exit_code": 1}
    moves: list[tuple[str, str, dict[str, Any]]] = [
        ("job.submitted", "user:ana", {"name": "train-7b", "number": 17, "spec": "{}"}),
        (
            "attempt.placed",
            "shoal",
            {"type": "AttemptPlaced", "allocation": [share, {**share, "node": "node-03"}]},
        ),
        ("attempt.noted", "shoal", {"type": "SubmissionAccepted", "native_id": "local:att_1"}),
        ("attempt.running", "shoal", {"type": "TaskStarted", "node": "node-02"}),
        ("attempt.ended", "shoal", {"type": "TaskEnded", "outcome": outcome}),
        ("job.retrying", "shoal", {"reason": "exit", "epoch": 2, "backoff_s": 5.0}),
        ("attempt.ended", "shoal", {"type": "TaskEnded", "outcome": {**outcome, "message": "", "epoch": 2}}),
        (
            "attempt.stopping",
            "user:ana",
            {"type": "StopRequested", "reason": "cancelled", "by": "ana", "because": ""},
        ),
        ("attempt.ended", "shoal", {"type": "SubmissionRefused", "message": "no such image"}),
        ("attempt.ended", "shoal", {"type": "FenceExpired"}),
        ("job.ended", "shoal", {"outcome": "failed", "because": f"node-02: {arguments}"}),
        ("job.ended", "shoal", {"outcome": "succeeded", "because": ""}),
    ]
    seen = [
        {"kind": kind, "actor": actor, "project": "vision", "job_id": "job_1", "ref": "vision/17",
         "node": None,
         "data": {"event": data, "from": "x", "to": "x"} if kind.startswith("attempt.") else data}
        for kind, actor, data in moves
    ]  # fmt: skip
    about = {"job_id": None, "ref": None, "node": None}
    seen += [
        {"kind": "plan.made", "actor": "shoal", "project": None, **about,
         "data": {"placed": ["att_1"], "starts": [], "waiting": 3}},
        {"kind": "member.set", "actor": "user:ana", "project": "vision", **about,
         "data": {"user": "bob", "role": "lead"}},
        {"kind": "project.updated", "actor": "user:ana", "project": "vision", **about,
         "data": {"quota": {"gpus": 64, "cpus": None}, "limit": None, "weight": 2.0}},
        {"kind": "access.denied", "actor": "user:eve", "project": None, **about,
         "data": {"what": "denied", "code": "denied", "method": "POST", "path": "/v1/nodes/n1/drain"}},
    ]  # fmt: skip
    return [{"seq": 42 + place, "at": NOW, **event} for place, event in enumerate(seen)]


def services() -> list[dict[str, Any]]:
    """One on its way to a new release, and one that sleeps."""
    rollout = {"old": 2, "new": 3, "stage": "canary", "step": 1, "share": 0.25, "since": NOW, "because": "",
               "waits": "needs 1 node with 1 free GPU; none is free"}  # fmt: skip
    facts = {"id": "svc_1", "ref": "vision/chat", "release": 2, "newest_release": 3,
             "ready": 4, "replicas": 4, "min_replicas": 0, "max_replicas": 8, "rollout": rollout,
             "is_stopping": False, "created_at": NOW - 90_000, "path": "/vision/chat/",
             "url": "http://127.0.0.1:7463/vision/chat/"}  # fmt: skip
    idle = {**facts, "id": "svc_2", "ref": "vision/rank\x1b[31m", "release": 1, "ready": 0, "replicas": 0,
            "rollout": None, "url": None, "path": "/vision/rank/"}  # fmt: skip
    return [facts, idle]


def resizes() -> list[dict[str, Any]]:
    why = "61 requests there, 5 waiting; concurrency of 16 for each replica"
    return [
        {"at": NOW - 300, "replicas": 1, "because": "0 requests there, 1 waiting; \x1b[31mred"},
        {"at": NOW - 30, "replicas": 4, "because": why},
    ]


def servers() -> list[dict[str, Any]]:
    ready = {"job_id": "job_1", "ref": "vision/21", "release": 2, "slot": 4, "state": "ready",
             "nodes": ["node-01"], "address": "10.0.0.1:30000", "because": "",
             "cold_start_s": 12.25}  # fmt: skip
    waits = {**ready, "ref": "vision/25", "release": 3, "slot": 5, "state": "running",
             "address": "10.0.0.1:30001", "because": "connection refused", "cold_start_s": None}  # fmt: skip
    return [ready, waits, {**waits, "ref": "vision/26", "state": "queued", "nodes": [], "address": ""}]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApiServer]:
    for module in (queue_command, status_command):
        monkeypatch.setattr(module.time, "time", lambda: NOW)
    jobs = [
        {**job_view(17), "outlook": OUTLOOK},
        job_view(16, "starting", name="eval", owner="bernadette-long", nodes=["node-03"]),
        job_view(
            12, "running", name="pretrain-with-a-very-long-name", nodes=[f"node-{n:02d}" for n in (1, 2, 5)]
        ),
        job_view(
            9,
            "failed",
            name="\x1b[31mred\x1b]0;x\x07",
            owner="eve",
            because="rank 3 exited with 1 on node-02",
        ),
        job_view(8, "succeeded", name="ok", because=""),
        job_view(
            7, "succeeded", name="a-sweep-of-learning-rates", array={"id": "arr_1", "index": 12, "size": 20}
        ),
    ]
    with running_fake() as server:
        server.answers["GET", "/v1/jobs"] = {"items": jobs, "next_cursor": None}
        why = {"job": jobs[0], "status": "queued", "explanation": WAITING, "sentence": WAITING["sentence"],
               "outlook": OUTLOOK}  # fmt: skip
        server.answers["GET", f"/v1/jobs/{jobs[0]['job_id']}/why"] = why
        server.answers["GET", "/v1/nodes"] = {"items": gpu_nodes(), "next_cursor": None}
        server.answers["GET", "/v1/projects"] = {"items": projects(), "next_cursor": None}
        server.answers["GET", "/v1/services"] = {"items": services(), "next_cursor": None}
        releases = [{"number": 2, "model": "chat@40"}, {"number": 3, "model": ""}]
        starts = [
            {"queued_s": 0.25, "starting_s": 1.0, "loading_s": loading} for loading in (9.0, 11.0, 60.0)
        ]
        shown = {**services()[0], "servers": servers(), "releases": releases, "starts": starts,
                 "load": {"in_flight": 61, "queued": 5, "rps": 240}, "resizes": resizes()}  # fmt: skip
        server.answers["GET", "/v1/services/svc_1"] = shown
        server.answers["GET", "/v1/windows"] = {"items": windows(), "next_cursor": None}
        server.answers["GET", "/v1/nodes/node-07"] = gpu_nodes()[2]
        server.answers["GET", "/v1/status"] = {
            "version": "0.1.0", "store": "sqlite", "engine": "local", "started_at": NOW - 7500,
            "counts": {"queued": 4, "running": 2, "starting": 0},
            "nodes": {"total": 5, "ready": 3, "draining": 1, "silent": 1, "dead": 0, "gone": 1},
            "devices": {"gpus_total": 32, "gpus_used": 24, "cpus_total": 256.0,
            "cpus_used": 97.5}, "events_head": {"seq": 812, "hash": "ab" * 32},
        }  # fmt: skip
        event = {"seq": 41, "at": NOW, "kind": "node.draining", "actor": "user:ana", "project": None,
                 "job_id": None, "node": "node-07", "data": {"because": "bad NVLink"},
                 "hash": "cd"}  # fmt: skip
        server.answers["GET", "/v1/events"] = {"items": [event, *life_of_a_job()], "next_cursor": None}
        yield server


@pytest.fixture
def shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake: FakeApiServer
) -> Shell:
    new_shell = Shell(tmp_path, monkeypatch, capsys)
    new_shell.connect_to(fake)
    return new_shell


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("queue", ("queue", "--all")),
        ("queue-predict", ("queue", "--predict")),
        ("why", ("why", f"job_{17:026d}")),
        ("nodes", ("nodes",)),
        ("node", ("nodes", "node-07")),
        ("projects", ("project",)),
        ("project", ("project", "show", "vision")),
        ("reservations", ("reservations",)),
        ("help-reserve", ("reserve", "--help")),
        ("services", ("services",)),
        ("service", ("services", "svc_1")),
        ("rollout", ("rollout", "svc_1")),
        ("help-serve", ("serve", "--help")),
        ("status", ("status",)),
        ("events", ("events",)),
        ("help", ("--help",)),
        ("help-run", ("run", "--help")),
    ],
)
def test_screen_looks_as_recorded(
    shell: Shell, fake: FakeApiServer, name: str, argv: tuple[str, ...]
) -> None:
    result = shell(*argv)
    assert result.code == 0, result.err
    text = result.out.replace(fake.url, "http://127.0.0.1:7462")
    assert "\x1b" not in text
    assert all(len(line) <= 80 for line in text.splitlines() if "://" not in line)
    path = FILES / f"{name}.txt"
    if os.environ.get("SHOAL_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
