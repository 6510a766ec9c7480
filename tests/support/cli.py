"""Run `shoal` in this process against a fake control plane."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import run_command
from tests.support.fake_server import TOKEN, FakeServer


@dataclass
class Result:
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

    def talk_to(self, fake: FakeServer) -> None:
        self.monkeypatch.setenv("SHOAL_URL", fake.url)
        self.monkeypatch.setenv("SHOAL_TOKEN", TOKEN)

    def __call__(self, *argv: str) -> Result:
        self.capsys.readouterr()
        try:
            code = run_command(list(argv))
        except SystemExit as end:
            code = int(end.code or 0)
        captured = self.capsys.readouterr()
        return Result(code, captured.out, captured.err)
