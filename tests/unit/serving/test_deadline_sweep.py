"""A fault in a sweep is logged and ends at most one connection; the process and other deadlines go on."""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

import pytest

from shoal.serving import housekeeping as sweeping
from shoal.serving.balance.service import LiveService
from shoal.serving.housekeeping import MAX_FAULTS_LOGGED, SweepFaults, keep_sweeping, sweep
from shoal.serving.proxy.downstream import Downstream
from tests.support.serving.data_plane_lab import EmbeddedLab, request_bytes, service, until


async def test_connection_whose_sweep_fails_ends_and_the_others_are_swept(
    lab: EmbeddedLab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wires = [await lab.connect() for _ in range(3)]
    await until(lambda: len(lab.plane.clients) == 3)
    bad = next(iter(lab.plane.clients))
    whole = Downstream.sweep

    def faulty(client: Downstream, now: float) -> None:
        if client is bad:
            raise ZeroDivisionError("planted")
        whole(client, now)

    monkeypatch.setattr(Downstream, "sweep", faulty)
    sweep(lab.plane, monotonic() + 11.0)
    for wire in wires:
        assert await wire.is_closed()
    assert "ZeroDivisionError: planted" in caplog.text
    assert "Traceback" in caplog.text


async def test_service_whose_sweep_fails_does_not_stop_the_sweep_of_others(
    lab: EmbeddedLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.serve(service(name="a"), service(name="b"))
    seen = []

    def faulty(live: LiveService, now: float) -> None:
        seen.append(live.spec.name)
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(LiveService, "sweep", faulty)
    sweep(lab.plane, monotonic())
    assert sorted(seen) == ["a", "b"]


async def test_sweeping_goes_on_after_a_fault(lab: EmbeddedLab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.serve(service(await lab.add_replica()))
    swept = 0

    def faulty(live: LiveService, now: float) -> None:
        nonlocal swept
        swept += 1
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(LiveService, "sweep", faulty)
    monkeypatch.setattr(sweeping, "SWEEP_INTERVAL_S", 0.001)
    task = asyncio.ensure_future(keep_sweeping(lab.plane))
    await until(lambda: swept >= 3)
    assert not task.done()
    task.cancel()
    assert (await lab.ask(request_bytes())).status == 200


def _broken() -> None:
    raise ZeroDivisionError("planted")


def test_sweep_faults_are_logged_with_tracebacks_at_a_limited_rate(caplog: pytest.LogCaptureFixture) -> None:
    faults = SweepFaults()
    for n in range(1000):
        assert not faults.guard(1000.0 + n / 100, "it", _broken)
    assert len(caplog.records) == MAX_FAULTS_LOGGED
    faults.guard(1061.0, "it", _broken)
    assert len(caplog.records) == MAX_FAULTS_LOGGED + 2
    assert caplog.records[-2].getMessage() == "990 more faults while sweeping in the minute before"
    assert {record.levelno for record in caplog.records} == {logging.ERROR}
