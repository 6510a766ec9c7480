"""Which ports the control plane keeps projects' jobs from answering at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import held_ports
from shoal.settings import Settings, load_settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return replace(load_settings({}), home=tmp_path, port=7462, serve_port=7463)


def test_usual_and_named_ports_are_held_and_not_one_that_the_kernel_chose(settings: Settings) -> None:
    assert held_ports.ports(settings, 7462) == {7462, 7463}
    assert held_ports.ports(settings, 40_000) == {7463}
    assert held_ports.ports(replace(settings, port=0, serve_port=0), 40_000) == set()


def test_port_that_services_have_instead_is_held(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {"url": "http://[::1]:41000"}
    monkeypatch.setattr(held_ports, "running", lambda _: found)
    assert held_ports.ports(settings, 7462) == {7462, 7463, 41_000}
    assert held_ports.ports(replace(settings, serve_port=0), 7462) == {7462}
