"""The log has JSON lines without secrets, and never blocks."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from shoal.identity.credentials import (
    SignedKind,
    bootstrap_token,
    data_plane_token,
    job_token,
    mint_token,
    parse_signed,
    proof_key,
)
from shoal.log import configure_log, get_logger, redact
from shoal.proof import sign_for


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[Path]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    for handler in before:
        root.removeHandler(handler)
    path = tmp_path / "logs" / "control.log"
    configure_log(path)
    yield path
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    for handler in before:
        root.addHandler(handler)
    root.setLevel(level)
    structlog.reset_defaults()


def test_log_lines_of_every_library_are_json(log_file: Path) -> None:
    get_logger("shoal.test").info("job placed", job_id="job_1", nodes=["n1"])
    logging.getLogger("uvicorn").warning("slow %s", "peer\nwith a newline")
    lines = [json.loads(line) for line in log_file.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["job placed", "slow peer\nwith a newline"]
    assert lines[0]["nodes"] == ["n1"]


PUBLIC = "01hzzzzzzzzzzzzzzzzzzzzzzz"
KEY, ATTEMPT = b"k" * 32, f"att_{PUBLIC}"
TOKENS = {
    "user": mint_token(f"tok_{PUBLIC}", os.urandom).text,
    SignedKind.JOB: job_token(KEY, ATTEMPT),
    SignedKind.SUPERVISOR: sign_for(proof_key(KEY, ATTEMPT, "node-1"), ATTEMPT, "node-1", b"a body"),
    SignedKind.DATA_PLANE: data_plane_token(KEY),
    SignedKind.BOOTSTRAP: bootstrap_token(KEY, ATTEMPT),
}


@pytest.mark.parametrize("kind", ["user", *SignedKind])
def test_no_token_reaches_the_log(log_file: Path, kind: str) -> None:
    token, log = TOKENS[kind], get_logger("shoal.test")
    assert kind == "user" or parse_signed(KEY, token) is not None
    log.info("request", headers={"authorization": f"Bearer {token}"}, path=f"/v1/x?token={token}")
    log.info("answer", said=f"this:\n{token}\nand no more", path=f"/v1/x?authorization=Bearer%20{token}")
    try:
        raise ValueError(token)
    except ValueError:
        log.exception("it broke")
    written = log_file.read_text()
    assert token.rpartition("_")[2] not in written
    assert "and no more" in written
    assert (PUBLIC in written) is (PUBLIC in token)


def test_what_is_not_a_token_is_left_alone() -> None:
    text = (
        "shell_script wash_up fish_1 shm_open.c:12 /dev/shm/att_1.x pushd_1 sshd_config.d/5.conf flashd_v2.so"
    )
    assert redact(text) == text


def test_a_log_that_cannot_be_written_is_dropped(log_file: Path) -> None:
    log_file.parent.rename(log_file.parent.with_name("moved"))
    get_logger("shoal.test").info("still alive")
