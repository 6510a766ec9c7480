"""Rows 6, 7 and 8: tokens cannot be guessed, told apart, or found in stored data."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from shoal.identity import mint_token
from tests.support.planes.world import ApiWorld, open_world


def test_guesses_are_refused_then_slowed_and_never_lock_out_the_owner(tmp_path: Path) -> None:
    with open_world(tmp_path) as world:
        statuses = [
            world.call("GET", "/v1/me", token=f"shl_tok_0_{number:064x}").status for number in range(300)
        ]
        assert set(statuses) == {401, 429}
        assert statuses.index(429) <= 110
        assert statuses[-50:].count(429) >= 45
        assert world.call("GET", "/v1/me", role="viewer").status == 200
        assert world.call("GET", "/v1/me", token="wrong", client=("10.0.0.9", 1)).status == 401


def test_a_wrong_id_and_a_wrong_secret_are_answered_alike(world: ApiWorld) -> None:
    right = world.tokens["member"]
    other_secret = right[:-64] + "0" * 64
    other_id = right.replace(right.split("_")[2], "0" * 26)
    answers = [
        world.call("GET", "/v1/me", token=token, client=("10.0.0.1", 1)).json()
        for token in (other_secret, other_id)
    ]
    for answer in answers:
        answer.pop("request_id")
    assert answers[0] == answers[1]


def test_each_caller_kind_has_its_own_key_space(world: ApiWorld) -> None:
    job, supervisor = world.tokens["job"], world.tokens["supervisor"]
    mac = job.rsplit("_", 1)[1]
    attempt = job.removeprefix("shj_").rsplit("_", 1)[0]
    assert world.call("GET", "/v1/self", token=f"shs_{attempt}.node-1_{mac}_{mac}").status in (401, 429)
    assert world.call("GET", "/v1/self", token=supervisor.replace("shs_", "shj_")).status in (401, 429)


def test_a_new_secret_has_at_least_128_random_bits() -> None:
    secrets = {mint_token("tok_1", os.urandom).text.rsplit("_", 1)[1] for _ in range(50)}
    assert len(secrets) == 50
    assert min(len(secret) for secret in secrets) * math.log2(16) >= 128


@pytest.mark.slow
def test_no_token_or_secret_is_found_in_anything_kept_on_disk(tmp_path: Path) -> None:
    with open_world(tmp_path, is_durable=True) as world:
        spec = {"run": "sleep 1000", "secrets": ["API_KEY"]}
        sealed = "hunter2-this-is-secret"
        body = {"spec": spec, "project": "vision", "secrets": {"API_KEY": sealed}}
        assert world.call("POST", "/v1/jobs", role="member", data=body).status == 201
        created = world.call(
            "POST", "/v1/tokens", role="member", data={"label": "x"}, headers=[("idempotency-key", "k1")]
        )
        assert created.status == 201
        secret_parts = [token.rsplit("_", 1)[1] for token in world.tokens.values()]
        secret_parts += [sealed, created.json()["text"].rsplit("_", 1)[1]]
        kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    kept += b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert len(kept) > 50_000
    assert [word for word in secret_parts if word.encode() in kept] == []
