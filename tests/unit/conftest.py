"""A server that answers as told, and a shell that talks to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli.jobs import follow
from tests.support.fakes.api_server import FakeApiServer, Shell, job_view, running_fake


@pytest.fixture
def fake() -> Iterator[FakeApiServer]:
    with running_fake() as server:
        server.answers["GET", "/v1/jobs"] = {"items": [job_view()], "next_cursor": None}
        yield server


@pytest.fixture
def shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake: FakeApiServer
) -> Shell:
    made = Shell(tmp_path / "home", monkeypatch, capsys)
    made.connect_to(fake)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(follow, "PATIENCE_S", 0.0)
    return made
