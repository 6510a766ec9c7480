"""One control plane in one home; options that come back; a token that is shown once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli import home as homes
from shoal.cli.daemon import environment
from shoal.client.credentials import LOCAL, Credentials, find_endpoint
from shoal.errors import SpecError, StateError

HOLD = """
import sys
from pathlib import Path
from shoal.cli.home import hold
held = hold(Path(sys.argv[1]))
print(1, flush=True)
sys.stdin.read()
"""


def test_a_home_has_one_holder_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    assert homes.holder(tmp_path) is None
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        assert homes.holder(tmp_path) == process.pid
        with pytest.raises(StateError, match="already running"):
            homes.hold(tmp_path)
    finally:
        process.kill()
        process.communicate()
    assert homes.holder(tmp_path) is None
    homes.hold(tmp_path).close()


def test_the_home_is_for_its_owner_alone(tmp_path: Path) -> None:
    homes.prepare_home(tmp_path / "home")
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match="cannot use"):
        homes.prepare_home(tmp_path / "file")


def test_the_first_token_is_saved_then_shown_once(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "first-token").write_text("shl_tok_1_x")
    assert homes.adopt_first_token(tmp_path) == "shl_tok_1_x"
    assert homes.adopt_first_token(tmp_path) is None
    assert Credentials(tmp_path).token(LOCAL) == "shl_tok_1_x"


def test_starting_the_own_server_makes_it_the_one_to_talk_to(tmp_path: Path) -> None:
    Credentials(tmp_path).save("https://far:1", "shl_far")
    homes.adopt_first_token(tmp_path)
    homes.write_server_file(tmp_path, {"url": "http://127.0.0.1:5", "pid": 1})
    assert find_endpoint({"SHOAL_HOME": str(tmp_path)}).url == "http://127.0.0.1:5"
    assert Credentials(tmp_path).token("https://far:1") == "shl_far"


def test_a_server_takes_back_only_its_own_address(tmp_path: Path) -> None:
    homes.write_server_file(tmp_path, {"url": "http://127.0.0.1:5", "pid": 5})
    homes.remove_server_file(tmp_path, 4)
    assert json.loads((tmp_path / "server.json").read_text())["pid"] == 5
    homes.remove_server_file(tmp_path, 5)
    assert not (tmp_path / "server.json").exists()


def test_options_are_remembered_for_their_owner_alone(tmp_path: Path) -> None:
    assert homes.load_remembered(tmp_path) == {}
    homes.remember(tmp_path, {"database_url": "postgresql://u:pw@h/d"})
    assert homes.load_remembered(tmp_path) == {"database_url": "postgresql://u:pw@h/d"}
    assert (tmp_path / "options.json").stat().st_mode & 0o777 == 0o600


def test_the_server_process_is_told_by_variables_and_gets_no_callers_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_TOKEN", "shl_mine")
    monkeypatch.setenv("SHOAL_URL", "https://far")
    told = environment({"database_url": "sqlite:///x", "demo": "4x8"}, tmp_path)
    assert told["SHOAL_DATABASE_URL"] == "sqlite:///x"
    assert told["SHOAL_DEMO"] == "4x8"
    assert told["SHOAL_HOME"] == str(tmp_path)
    assert not {"SHOAL_TOKEN", "SHOAL_URL"} & set(told)
    assert told["PATH"] == os.environ["PATH"]
