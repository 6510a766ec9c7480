"""A fault in a sweep is told and costs a connection at most: not the process, not others' deadlines."""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

import pytest

from shoal.serving import sweep as sweeping
from shoal.serving.downstream import Downstream
from shoal.serving.service import LiveService
from shoal.serving.sweep import MOST_TOLD, Faults, keep_sweeping, sweep
from tests.support.serving import Lab, get, service, until


async def test_connection_that_cannot_be_swept_ends_and_the_others_are_swept(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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


async def test_service_that_cannot_be_swept_keeps_no_other_from_it(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.serve(service(name="a"), service(name="b"))
    seen = []

    def faulty(live: LiveService, now: float) -> None:
        seen.append(live.spec.name)
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(LiveService, "sweep", faulty)
    sweep(lab.plane, monotonic())
    assert sorted(seen) == ["a", "b"]


async def test_sweeping_goes_on_after_a_fault(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.serve(service(await lab.replica()))
    swept = 0

    def faulty(live: LiveService, now: float) -> None:
        nonlocal swept
        swept += 1
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(LiveService, "sweep", faulty)
    monkeypatch.setattr(sweeping, "EVERY_S", 0.001)
    task = asyncio.ensure_future(keep_sweeping(lab.plane))
    await until(lambda: swept >= 3)
    assert not task.done()
    task.cancel()
    assert (await lab.ask(get())).status == 200


def _broken() -> None:
    raise ZeroDivisionError("planted")


def test_faults_are_told_with_their_tracebacks_but_not_without_end(caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults()
    for n in range(1000):
        assert not faults.within(1000.0 + n / 100, "it", _broken)
    assert len(caplog.records) == MOST_TOLD
    faults.within(1061.0, "it", _broken)
    assert len(caplog.records) == MOST_TOLD + 2
    assert caplog.records[-2].getMessage() == "990 more faults while sweeping in the minute before"
    assert {record.levelno for record in caplog.records} == {logging.ERROR}
