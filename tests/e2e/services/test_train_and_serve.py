"""Train the example, serve its checkpoint, and call it with the `openai` client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import openai

from tests.support.planes.simulated import SimulatedCluster, running_cluster
from tests.support.runtime.language_model import next_tokens

STEPS = 12
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture
def shoal(tmp_path: Path) -> Iterator[SimulatedCluster]:
    with running_cluster(tmp_path / "home", "--demo", "1x2", "--serve-on", "127.0.0.1:0") as cluster:
        yield cluster


def checkpoint_of(shoal: SimulatedCluster, job: str, step: int) -> Path:
    [job_id] = [job["job_id"] for job in shoal.jobs(job)]
    folder = Path(shoal.env["SHOAL_HOME"]) / "checkpoints" / str(job_id)
    [checkpoint] = folder.glob(f"step-{step:012d}-*")
    return checkpoint


def service(shoal: SimulatedCluster) -> dict[str, Any]:
    return dict(json.loads(shoal("services", "lm", "--json")))


def test_trained_checkpoint_is_served_and_streams_to_a_client_with_a_token(shoal: SimulatedCluster) -> None:
    trained = ("-e", f"STEPS={STEPS}", "-e", f"SAVE_EVERY={STEPS}", "examples/language_model/ddp.yaml")
    [weights] = set(re.findall(r"weights ([0-9a-f]{16})", shoal("run", *trained)))
    shoal("serve", "examples/language_model/serve.yaml", "--wait", "90")
    shown = service(shoal)
    assert [(release["number"], release["model"]) for release in shown["releases"]] == [
        (1, f"lm-ddp@{STEPS}")
    ]
    page = shoal("services", "lm")
    assert f"release 1 (lm-ddp@{STEPS}), 1 of 1 ready\n" in page
    assert "\ncold start " in page
    [start] = shown["starts"]
    assert start["loading_s"] > 0
    shoal.until(lambda: bool(service(shoal)["url"]))
    url = f"{service(shoal)['url']}v1"
    token = json.loads(shoal("token", "create", "--project", "default", "--service", "lm", "--json"))
    right = next_tokens(checkpoint_of(shoal, "lm-ddp", STEPS), [3, 5, 7], 10)
    fields: dict[str, Any] = {"model": "counting", "prompt": "3 5 7", "temperature": 0, "max_tokens": 10}
    with openai.OpenAI(base_url=url, api_key=token["text"]) as client:
        chunks = list(client.completions.create(**fields, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == right
        assert {chunk.system_fingerprint for chunk in chunks} == {f"step-{STEPS}-{weights}"}
        assert client.completions.create(**fields).choices[0].text == right
    stranger = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    with stranger as client, pytest.raises(openai.AuthenticationError):
        client.completions.create(**fields)
