"""The ports at which the control plane forbids projects' jobs to answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.control_plane import data_plane
from shoal.settings import Settings, load_settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return replace(load_settings({}), home=tmp_path, port=7462, serve_port=7463)


def test_usual_and_named_ports_are_held_and_not_one_that_the_kernel_chose(settings: Settings) -> None:
    assert data_plane.ports_to_hold(settings, 7462) == {7462, 7463}
    assert data_plane.ports_to_hold(settings, 40_000) == {7463}
    assert data_plane.ports_to_hold(replace(settings, port=0, serve_port=0), 40_000) == set()


def test_port_that_services_have_instead_is_held(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    record: dict[str, Any] = {"url": "http://[::1]:41000"}
    monkeypatch.setattr(data_plane, "running_data_plane", lambda _: record)
    assert data_plane.ports_to_hold(settings, 7462) == {7462, 7463, 41_000}
    assert data_plane.ports_to_hold(replace(settings, serve_port=0), 7462) == {7462}
