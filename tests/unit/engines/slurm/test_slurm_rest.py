"""The transport of slurmrestd, over servers on paper: what it makes of answers that are none."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from shoal.engines.slurm.config import SlurmConfig
from shoal.engines.slurm.parse import SlurmFacts
from shoal.engines.slurm.render import SlurmJobRequest
from shoal.engines.slurm.rest import RestTransport
from shoal.engines.slurm.transport import open_transport
from shoal.errors import EngineRefused, EngineUnreachable
from tests.unit.engines.slurm.test_slurm_rest_messages import RECORDED, token

REQUEST = SlurmJobRequest(
    name="n", comment="c", nodes=("n0",), cpus=1, output="/dev/null", script="#!/bin/sh\n"
)
PING = (RECORDED / "v0.0.38" / "ping.json").read_bytes()


class Paper(ThreadingHTTPServer):
    """Answers by path with what it was given, and 404 to the rest."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, tuple[int, bytes]] = {"/slurm/v0.0.38/ping": (200, PING)}
        self.asked: list[tuple[str, str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Paper

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        result = self.headers.get("X-SLURM-USER-NAME", ""), self.headers.get("X-SLURM-USER-TOKEN", "")
        self.server.asked.append((f"{self.command} {self.path}", *result))
        status, body = self.server.answers.get(self.path, (404, b"Unable find requested URL."))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_DELETE = _answer  # noqa: N815

    def log_error(self, format: str, *args: object) -> None:
        pass

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def on_paper() -> Iterator[Paper]:
    with Paper() as server:
        thread = Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def paper() -> Iterator[Paper]:
    with on_paper() as server:
        yield server


@pytest.fixture
def jwt(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(token(sun="ana"))
    file.chmod(0o600)
    return file


def door(paper: Paper, jwt: Path, **more: object) -> RestTransport:
    return RestTransport(paper.url, str(jwt), **more)  # type: ignore[arg-type]


def test_a_renewed_token_is_used_at_once(paper: Paper, jwt: Path) -> None:
    paper.answers["/slurm/v0.0.38/nodes"] = 200, b"{}"
    asking = door(paper, jwt)
    asking.nodes()
    jwt.write_text(token(sun="ana", exp=4_000_000_000))
    asking.nodes()
    assert [result[2] for result in paper.asked[-2:]] == [
        token(sun="ana"),
        token(sun="ana", exp=4_000_000_000),
    ]
    assert {result[1] for result in paper.asked} == {"ana"}


def test_a_version_that_we_do_not_speak_is_refused_by_name(paper: Paper, jwt: Path) -> None:
    paper.answers = {
        "/openapi/v3": (200, b'{"paths": {"/slurm/v0.0.40/ping/": {}, "/slurm/v0.0.41/ping/": {}}}')
    }
    with pytest.raises(
        EngineUnreachable, match=re.escape("speaks v0.0.41, v0.0.40; Shoal speaks v0.0.42, v0.0.38")
    ):
        door(paper, jwt).version()


def test_a_slurmrestd_that_was_upgraded_is_asked_for_its_version_again(paper: Paper, jwt: Path) -> None:
    paper.answers["/slurm/v0.0.38/nodes"] = 200, b"{}"
    asking = door(paper, jwt)
    asking.nodes()
    ping = (RECORDED / "v0.0.42" / "ping.json").read_bytes()
    paper.answers = {"/slurm/v0.0.42/ping": (200, ping), "/slurm/v0.0.42/nodes": (200, b"{}")}
    with pytest.raises(EngineUnreachable, match=re.escape("has no /slurm/v0.0.38/nodes")):
        asking.nodes()
    asking.nodes()
    assert asking.version() == "slurm 24.11.5, by REST v0.0.42"
    assert asking.facts() == SlurmFacts(cluster="lab", heads=("vm",))


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (502, b"<html>Bad Gateway</html>", "said 502: <html>Bad Gateway"),
        (503, b'{"errors": []}', "said 503"),
        (500, b'{"errors": []}', "said: 500"),
        (200, b'{"errors": []}', "said: 200"),
        (200, b"<html>a portal</html>", "said 200: <html>a portal"),
        (401, b"Authentication failure", "does not take the token"),
        (302, b"elsewhere", "said 302"),
        (500, (RECORDED / "v0.0.38" / "refused.json").read_bytes(), "Invalid partition name specified"),
        (404, b"Unable find requested URL.", "has no /slurm/v0.0.38/job/submit"),
        (
            500,
            b'{"errors": [{"error_code": 5005, "error": "Zero Bytes were transmitted or received"}]}',
            "token",
        ),
        (
            500,
            b'{"errors": [{"error": "Job violates accounting/QOS policy (submit limit)"}]}',
            "violates",
        ),
    ],
)
def test_what_is_no_answer_of_slurm_refuses_no_job(
    paper: Paper, jwt: Path, status: int, body: bytes, message: str
) -> None:
    paper.answers["/slurm/v0.0.38/job/submit"] = status, body
    with pytest.raises(EngineUnreachable, match=re.escape(message)):
        door(paper, jwt).submit(REQUEST)


def test_a_refusal_is_in_the_words_of_slurm(paper: Paper, jwt: Path) -> None:
    message = "Requested node configuration is not available"
    body = f'{{"errors": [{{"error_code": 2014, "error": "{message}"}}]}}'.encode()
    paper.answers["/slurm/v0.0.38/job/submit"] = 500, body
    with pytest.raises(EngineRefused, match=f"slurmrestd said: {message}"):
        door(paper, jwt).submit(REQUEST)


def test_no_slurmrestd_is_away(paper: Paper, jwt: Path) -> None:
    paper.server_close()
    with pytest.raises(EngineUnreachable, match="did not answer"):
        door(paper, jwt).nodes()


@pytest.mark.parametrize("url", ["https://127.0.0.1:{port}", "unix:/nowhere/rest.sock"])
def test_unknown_listener_gets_no_token(paper: Paper, jwt: Path, url: str) -> None:
    asking = RestTransport(url.format(port=paper.server_address[1]), str(jwt))
    with pytest.raises(EngineUnreachable, match="did not answer"):
        asking.nodes()
    assert paper.asked == []


def test_other_user_on_the_port_gets_no_token(paper: Paper, jwt: Path) -> None:
    uid = door(paper, jwt).served_by()
    assert uid is not None
    paper.answers["/slurm/v0.0.38/nodes"] = 200, b"{}"
    door(paper, jwt, served_by=uid).nodes()
    num_asked = len(paper.asked)
    with pytest.raises(EngineUnreachable, match=f"user {uid} listens"):
        door(paper, jwt, served_by=uid + 1).nodes()
    assert len(paper.asked) == num_asked


def test_configuration_selects_the_transport(jwt: Path) -> None:
    assert isinstance(
        open_transport(SlurmConfig(rest="unix:/run/rest.sock", jwt_file=str(jwt))), RestTransport
    )
    assert not isinstance(open_transport(SlurmConfig(ssh="ana@login")), RestTransport)
