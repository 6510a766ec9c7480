"""The log is JSON lines without secrets, and never an obstacle."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from shoal.log import configure_log, get_logger, redact


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


def test_every_line_is_json_whoever_wrote_it(log_file: Path) -> None:
    get_logger("shoal.test").info("job placed", job_id="job_1", nodes=["n1"])
    logging.getLogger("uvicorn").warning("slow %s", "peer\nwith a newline")
    lines = [json.loads(line) for line in log_file.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["job placed", "slow peer\nwith a newline"]
    assert lines[0]["nodes"] == ["n1"]


@pytest.mark.parametrize(
    "token",
    [
        "shl_tok_01hzzzzzzzzzzzzzzzzzzzzzzz_S3cretS3cret",
        "shj_att_01hzzzzzzzzzzzzzzzzzzzzzzz_S3cretS3cret",
        "shs_att_01hzzzzzzzzzzzzzzzzzzzzzzz.node-1_S3cretS3cret",
    ],
)
def test_no_token_reaches_the_log(log_file: Path, token: str) -> None:
    log = get_logger("shoal.test")
    log.info("request", headers={"authorization": f"Bearer {token}"}, path=f"/v1/x?token={token}")
    try:
        raise ValueError(token)
    except ValueError:
        log.exception("it broke")
    written = log_file.read_text()
    assert "S3cret" not in written
    assert "01hzzzzzzzzzzzzzzzzzzzzzzz" in written


def test_what_is_not_a_token_is_left_alone() -> None:
    assert redact("shell_script wash_up fish_1") == "shell_script wash_up fish_1"


def test_a_log_that_cannot_be_written_is_dropped(log_file: Path) -> None:
    log_file.parent.rename(log_file.parent.with_name("moved"))
    get_logger("shoal.test").info("still alive")
