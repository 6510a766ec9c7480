"""HAProxy's configuration, whole. `SHOAL_GOLDEN=write` renews the files."""

from __future__ import annotations

import os
from http import HTTPStatus
from pathlib import Path

import msgspec
import pytest

from shoal.serving.haproxy.render import HaproxySettings, as_map, render
from shoal.serving.table import AllowedCaller, CallerLimits, ReplicaConfig, ServiceConfig, ServingTable

HERE = Path(__file__).parent


def replica(number: int, **changes: object) -> ReplicaConfig:
    defaults = {"replica_id": f"rep_{number}", "address": f"10.0.0.{number}:8000", "release": 1}
    return msgspec.convert({**defaults, "secret": f"{number}" * 8, **changes}, ReplicaConfig)


CALLER = AllowedCaller(digest="ab" * 32, name="ana", project="vision")
EVERYTHING = ServiceConfig(
    project="vision",
    name="chat",
    hosts=("Chat.Example", "[fd00::9]"),
    replicas=(
        replica(1, weight=2.0),
        replica(2, address="rep-2.example:8000"),
        replica(3, address="[fd00::3]:80", is_draining=True),
    ),
    limits=CallerLimits(rps=2.5, concurrency=4),
    check="/health?deep=1",
    callers=(CALLER,),
    cap=16,
    queue_count=100,
    timeout_s=30.0,
)
CANARY = ServiceConfig(
    project="vision",
    name="canary",
    replicas=(replica(1), replica(2), replica(3, release=2)),
    shares={1: 0.9, 2: 0.1},
    retries=0,
    callers=(CALLER,),
    limits=CallerLimits(rps=50, per="project"),
)
OPEN = ServiceConfig(
    project="web", name="open", is_public=True, affinity="cookie:sid", replicas=(replica(4, secret=""),)
)
CASES = {
    "everything": (
        ServingTable(version=1, services=(EVERYTHING, CANARY, OPEN)),
        HaproxySettings(listener=3, has_tls=True),
    ),
    "nothing": (ServingTable(version=1), HaproxySettings(listener=3, num_threads=2)),
}


@pytest.mark.parametrize("case", CASES)
def test_what_haproxy_is_told(case: str) -> None:
    rendered = render(*CASES[case])
    texts = {f"{case}.cfg": rendered.config, f"{case}-callers.map": as_map(rendered.callers)}
    texts[f"{case}-routes.map"] = "".join(rendered.routes.values())
    phrase = HTTPStatus.REQUEST_URI_TOO_LONG.phrase  # which Python has changed its mind about
    for name, made_text in texts.items():
        text = made_text.replace(phrase, "URI Too Long")
        if os.environ.get("SHOAL_GOLDEN") == "write":
            (HERE / name).write_text(text)
        assert (HERE / name).read_text() == text
