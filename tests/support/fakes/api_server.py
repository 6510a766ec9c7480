"""A control plane made of dictionaries, in this process, for tests of the client and the command line.

It keeps what it was sent and can be told to misbehave: lose an answer, answer 503, cut a stream.

Run `shoal` in this process against a fake control plane.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from shoal.cli.main import run_command

TOKEN = "shl_tok_test_secretsecret"
LOST_REPLY = object()
"""An answer that never arrives: the connection is closed after the work was done."""


@dataclass
class RecordedRequest:
    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class FakeApiServer:
    """`answers[(method, path)]` is a value, or a list of values used up one by one (the last one stays)."""

    answers: dict[tuple[str, str], Any] = field(default_factory=dict)
    streams: dict[str, list[list[str]]] = field(default_factory=dict)
    """For a path, what each connection to it is sent, in SSE text, before it is cut."""
    requests: list[RecordedRequest] = field(default_factory=list)
    archives: dict[str, bytes] = field(default_factory=dict)
    jobs_by_key: dict[str, dict[str, Any]] = field(default_factory=dict)
    ahead_s: float = 0.0
    """Its clock, before that of this machine."""
    url: str = ""

    def problem(self, status: int, code: str, detail: str, **more: Any) -> tuple[int, dict[str, Any]]:
        return status, {"title": "x", "status": status, "code": code, "detail": detail, **more}

    def paths(self, method: str) -> list[str]:
        return [request.path for request in self.requests if request.method == method]

    def answer(self, request: RecordedRequest) -> Any:
        reply = self.answers.get((request.method, request.path))
        if isinstance(reply, list):
            reply = reply.pop(0) if len(reply) > 1 else reply[0]
        if callable(reply):
            reply = reply(request)
        if reply is not None:
            return reply
        if request.path == "/v1/me":
            projects = [{"name": "vision", "role": "member"}]
            return {
                "user": "ana",
                "actor": "user:ana",
                "projects": projects,
                "now": time.time() + self.ahead_s,
            }
        if request.path.startswith("/v1/archives/"):
            return self._archive(request)
        if (request.method, request.path) == ("POST", "/v1/jobs"):
            return self.submit(request)
        return self.problem(404, "not_found", "no such thing, or one you may not see")

    def submit(self, request: RecordedRequest) -> tuple[int, dict[str, Any]]:
        archive = request.json().get("archive")
        if archive is not None and archive not in self.archives:
            return self.problem(422, "archive.missing", "no such archive")
        key = request.headers.get("idempotency-key", "")
        is_repeated = key in self.jobs_by_key
        job = self.jobs_by_key.setdefault(key, job_view(number=len(self.jobs_by_key) + 1))
        return 201, {"jobs": [job], "count": 1, "array_id": None, "was_repeated": is_repeated}

    def _archive(self, request: RecordedRequest) -> tuple[int, dict[str, Any]]:
        digest = request.path.rsplit("/", 1)[1]
        if request.method == "PUT":
            assert hashlib.sha256(request.body).hexdigest() == digest
            self.archives[digest] = request.body
            return 201, {"digest": digest, "size_bytes": len(request.body)}
        if digest in self.archives:
            return 200, {"digest": digest, "size_bytes": len(self.archives[digest])}
        return self.problem(404, "not_found", "no such archive")


def job_view(number: int = 17, status: str = "queued", **more: Any) -> dict[str, Any]:
    """A job as the API shows it."""
    return {
        "job_id": f"job_{number:026d}", "ref": f"vision/{number}", "project": "vision", "number": number,
        "name": "train-7b", "owner": "ana", "queue": "default", "priority": 0, "status": status, "epoch": 1,
        "nodes": [], "array": None, "submitted_at": 1_800_000_000.0, "started_at": None, "ended_at": None,
        "exit_code": None, "because": "", "failures": 0, "losses": 0,
        "request": {"nodes": 4, "cpus": 8.0, "memory_bytes": None, "gpus": {"kind": None, "count": 8}},
        **more,
    }  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeApiServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = RecordedRequest(self.command, unquote(parts.path), parse_qs(parts.query), headers, body)
        self.fake.requests.append(request)
        if request.path in self.fake.streams:
            self._stream(request.path)
            return
        answer = self.fake.answer(request)
        if answer is LOST_REPLY:
            self.close_connection = True
            return
        status, data = answer if isinstance(answer, tuple) else (200, answer)
        raw = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def _stream(self, path: str) -> None:
        connections = self.fake.streams[path]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for text in connections.pop(0) if connections else []:
            raw = text.encode()
            self.wfile.write(f"{len(raw):x}\r\n".encode() + raw + b"\r\n")
            self.wfile.flush()
        self.close_connection = True

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _handle  # noqa: N815 - the base class names them


@contextmanager
def running_fake(port: int = 0) -> Iterator[FakeApiServer]:
    """A fake server on a port of the loopback, for as long as the block lasts."""
    fake = FakeApiServer()
    handler = type("Handler", (_Handler,), {"fake": fake})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)


def log_line(text: str, rank: int | None = 0) -> dict[str, Any]:
    return {"at": 1_800_000_000.25, "node": "n1", "rank": rank, "stream": "o", "text": text}


def sse(kind: str, data: Any, at: str | None = None) -> str:
    """One event as it travels."""
    return (f"id: {at}\n" if at else "") + f"event: {kind}\ndata: {json.dumps(data)}\n\n"


@dataclass
class ShellResult:
    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


@dataclass
class Shell:
    """A person's shell: a home of its own, 80 columns, no colour."""

    home: Path
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __post_init__(self) -> None:
        for name in ("SHOAL_URL", "SHOAL_TOKEN", "SHOAL_LISTEN", "SHOAL_DEMO", "SHOAL_DATABASE_URL"):
            self.monkeypatch.delenv(name, raising=False)
        self.monkeypatch.setenv("SHOAL_HOME", str(self.home))
        self.monkeypatch.setenv("COLUMNS", "80")
        self.monkeypatch.setenv("NO_COLOR", "1")
        self.monkeypatch.setenv("TZ", "UTC")
        time.tzset()

    def connect_to(self, fake: FakeApiServer) -> None:
        self.monkeypatch.setenv("SHOAL_URL", fake.url)
        self.monkeypatch.setenv("SHOAL_TOKEN", TOKEN)

    def __call__(self, *argv: str) -> ShellResult:
        self.capsys.readouterr()
        try:
            code = run_command(list(argv))
        except SystemExit as end:
            code = int(end.code or 0)
        captured = self.capsys.readouterr()
        return ShellResult(code, captured.out, captured.err)
