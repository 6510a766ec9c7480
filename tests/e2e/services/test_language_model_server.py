"""The example's server, called with the stock `openai` client: replies, refusals and cancelled requests."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import openai

from tests.style.tree import ROOT
from tests.support.planes.real import until
from tests.support.runtime.language_model import new_checkpoint, next_tokens

FOLDER = ROOT / "examples" / "language_model"
LOADED = re.compile(r"step-7-[0-9a-f]{16}")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


class Server:
    """One process of `serve.py`, at a port that it chose itself."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stderr is not None
        matches = (re.search(r"running on http://(\S+)", line) for line in process.stderr)
        self.address = next((match[1] for match in matches if match), "")
        assert self.address, "it ended before it listened"

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"http://{self.address}/v1", api_key="none", max_retries=0, timeout=60, **options
        )

    def health(self, **headers: str) -> tuple[int, dict[str, Any]]:
        link = http.client.HTTPConnection(self.address, timeout=30)
        try:
            link.request(
                "GET", "/health", headers={name.replace("_", "-"): headers[name] for name in headers}
            )
            answer = link.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            link.close()

    def until_ready(self) -> None:
        until(lambda: self.health()[0] == 200, "the weights are loaded")


def variables(checkpoint: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    return {**kept, "PORT": "0", "SHOAL_MODEL_DIR": str(checkpoint), "OMP_NUM_THREADS": "1"}


@contextmanager
def a_server(checkpoint: Path, **more: str) -> Iterator[Server]:
    with subprocess.Popen(
        [sys.executable, "serve.py"],
        cwd=FOLDER,
        env={**variables(checkpoint), **more},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Server(process)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_checkpoint(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    with a_server(checkpoint) as served:
        served.until_ready()
        yield served


GREEDY: dict[str, Any] = {"model": "counting", "temperature": 0}


def test_completion_is_the_checkpoints_whole_and_as_a_stream(server: Server, checkpoint: Path) -> None:
    right = next_tokens(checkpoint, [3, 5, 7], 12)
    with server.client() as client:
        assert [model.id for model in client.models.list()] == ["counting"]
        whole = client.completions.create(prompt="3 5 7", max_tokens=12, **GREEDY)
        counted: Any = {"include_usage": True}
        fields: Any = {"prompt": "3 5 7", "max_tokens": 12, "stream_options": counted, **GREEDY}
        chunks = list(client.completions.create(**fields, stream=True))
    assert whole.choices[0].text == right
    assert LOADED.fullmatch(str(whole.system_fingerprint))
    assert whole.choices[0].finish_reason == "length"
    pieces = [chunk.choices[0].text for chunk in chunks[:-1]]
    assert "".join(pieces) == right
    assert len(pieces) == 13
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 12, 15)


def test_chat_continues_the_whole_conversation(server: Server, checkpoint: Path) -> None:
    right = next_tokens(checkpoint, [1, 2, 3], 5)
    messages: Any = [{"role": "system", "content": "1 2"}, {"role": "user", "content": "3"}]
    with server.client() as client:
        whole = client.chat.completions.create(messages=messages, max_completion_tokens=5, **GREEDY)
        stream = client.chat.completions.create(messages=messages, max_tokens=5, stream=True, **GREEDY)
        chunks = list(stream)
    assert (whole.choices[0].message.role, whole.choices[0].message.content) == ("assistant", right)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == right
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_text_ends_before_a_stop_that_arrives_in_pieces(server: Server, checkpoint: Path) -> None:
    tokens = next_tokens(checkpoint, [9], 8).split()
    stop = f"{tokens[2]} {tokens[3]}"
    right = f" {' '.join(tokens)}".partition(stop)[0]
    with server.client() as client:
        fields: dict[str, Any] = {"prompt": [9], "max_tokens": 8, "stop": [stop, "no such"], **GREEDY}
        whole = client.completions.create(**fields)
        chunks = list(client.completions.create(**fields, stream=True))
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (right, "stop")
    assert "".join(chunk.choices[0].text for chunk in chunks) == right
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 4


def test_reply_is_limited_by_the_context(server: Server, checkpoint: Path) -> None:
    prompt = list(range(30))
    with server.client() as client:
        completion = client.completions.create(prompt=prompt, **GREEDY)
        most: Any = client.chat.completions.create(messages=[{"role": "user", "content": "1"}], **GREEDY)
    assert completion.choices[0].text == next_tokens(checkpoint, prompt, 3)
    assert most.usage.completion_tokens == 32


def test_same_seed_gives_the_same_text_and_another_does_not(server: Server) -> None:
    def drawn(seed: int) -> str:
        with server.client() as client:
            completion = client.completions.create(
                model="counting", prompt="1", max_tokens=30, temperature=1.5, top_p=0.9, seed=seed
            )
        return completion.choices[0].text

    assert drawn(1) == drawn(1) != drawn(2)


def test_more_callers_than_fit_a_batch_each_get_their_own_reply(server: Server, checkpoint: Path) -> None:
    with server.client() as client, ThreadPoolExecutor(24) as pool:

        def ask(first: int) -> str:
            completion = client.completions.create(prompt=[first], max_tokens=1 + first % 7, **GREEDY)
            return str(completion.choices[0].text)

        answers = list(pool.map(ask, range(40)))
    assert answers == [next_tokens(checkpoint, [first], 1 + first % 7) for first in range(40)]


@pytest.mark.parametrize(
    ("fields", "error", "param", "code"),
    [
        ({"model": "gpt"}, openai.NotFoundError, "model", "model_not_found"),
        ({"prompt": "one two"}, openai.BadRequestError, "prompt", None),
        ({"prompt": [61]}, openai.BadRequestError, "prompt", None),
        ({"prompt": ["1", "2"]}, openai.BadRequestError, "prompt", None),
        ({"max_tokens": 33}, openai.BadRequestError, "max_tokens", "context_length_exceeded"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens", None),
        ({"temperature": 3}, openai.BadRequestError, "temperature", None),
        ({"stop": ["a"] * 5}, openai.BadRequestError, "stop", None),
        ({"n": 2}, openai.BadRequestError, "n", None),
        ({"logprobs": 3}, openai.BadRequestError, "logprobs", None),
        ({"stream": True, "echo": True}, openai.BadRequestError, "echo", None),
    ],
)
def test_unsupported_fields_are_refused_as_the_client_expects(
    server: Server, fields: dict[str, Any], error: type[openai.APIStatusError], param: str, code: str | None
) -> None:
    with server.client() as client, pytest.raises(error) as refused:
        client.completions.create(**{"model": "counting", "prompt": "1", **fields})
    assert (refused.value.param, refused.value.code) == (param, code)
    assert refused.value.type == "invalid_request_error"


def test_reply_of_a_caller_that_left_is_abandoned_and_an_open_one_is_finished(checkpoint: Path) -> None:
    fields: dict[str, Any] = {"prompt": "1", "stream": True, **GREEDY}
    with a_server(checkpoint, PACE_S="0.5") as paced, paced.client() as client:
        paced.until_ready()
        stream = client.completions.create(max_tokens=32, **fields)
        next(iter(stream))
        stream.close()
        until(lambda: paced.health()[1]["running"] == 0, "it is dropped")
        assert paced.health()[1]["tokens"] < 32
        last = client.completions.create(max_tokens=5, **fields)
        first = next(iter(last)).choices[0].text
        paced.process.send_signal(signal.SIGTERM)
        rest = "".join(chunk.choices[0].text for chunk in last)
        assert first + rest == next_tokens(checkpoint, [1], 5)
        assert paced.process.wait(60) in (0, -signal.SIGTERM)


def test_no_request_is_served_before_the_weights_are_loaded_or_past_the_data_plane(
    checkpoint: Path, tmp_path: Path
) -> None:
    copy = tmp_path / checkpoint.name
    copy.mkdir()
    for file in checkpoint.iterdir():
        (copy / file.name).symlink_to(file)
    (copy / "manifest.json").unlink()
    os.mkfifo(copy / "manifest.json")  # a reader blocks until a process writes
    knows = {"x-shoal-secret": "s3cret"}
    with a_server(copy, SHOAL_REPLICA_KEY="s3cret") as held:
        assert held.health(**knows) == (503, {"loaded": "", "running": 0, "tokens": 0})
        with held.client(default_headers=knows) as client:
            with pytest.raises(openai.InternalServerError) as refused:
                client.completions.create(prompt="1", **GREEDY)
            assert refused.value.code == "loading"
            (copy / "manifest.json").write_bytes((checkpoint / "manifest.json").read_bytes())
            until(lambda: held.health(**knows)[0] == 200, "the weights are loaded")
            assert client.completions.create(prompt="1", **GREEDY).choices[0].text
        with held.client() as stranger, pytest.raises(openai.PermissionDeniedError):
            stranger.completions.create(prompt="1", **GREEDY)


def test_server_without_weights_ends_and_says_why(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "serve.py"],
        cwd=FOLDER,
        env=variables(tmp_path),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert "there is no checkpoint in" in done.stderr
