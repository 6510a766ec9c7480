"""Which server is used, and with which token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.client.credentials import LOCAL, Credentials, env_for_home, find_endpoint, write_private
from shoal.errors import ServerUnreachable, SpecError


def test_tokens_are_kept_for_their_owner_alone(tmp_path: Path) -> None:
    saved = Credentials(tmp_path / "home")
    saved.save("https://a:1", "shl_a")
    saved.save("https://b:2", "shl_b")
    assert saved.path.stat().st_mode & 0o777 == 0o600
    assert saved.path.parent.stat().st_mode & 0o777 == 0o700
    assert saved.token("https://a:1") == "shl_a"
    assert saved.token("https://b:2") == "shl_b"


def test_forgetting_the_current_server_leaves_the_others(tmp_path: Path) -> None:
    saved = Credentials(tmp_path)
    saved.save("https://a:1", "shl_a")
    saved.save("https://b:2", "shl_b")
    saved.use("https://b:2")
    saved.forget("https://b:2")
    assert saved.load() == {"current": None, "servers": {"https://a:1": {"token": "shl_a"}}}


def test_a_link_in_place_of_the_temporary_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("keep")
    (tmp_path / "credentials.json").symlink_to(victim)
    write_private(tmp_path / "credentials.json", "{}")
    assert victim.read_text() == "keep"
    assert not (tmp_path / "credentials.json").is_symlink()


def test_variables_override_what_was_saved(tmp_path: Path) -> None:
    Credentials(tmp_path).save("https://a:1", "shl_a")
    Credentials(tmp_path).use("https://a:1")
    env = {"SHOAL_HOME": str(tmp_path)}
    assert find_endpoint(env).url == "https://a:1"
    assert find_endpoint({**env, "SHOAL_TOKEN": "shl_x"}).token == "shl_x"
    other = find_endpoint({**env, "SHOAL_URL": "https://other:1/"})
    assert (other.url, other.token) == ("https://other:1", None)


def test_endpoint_says_what_chose_the_server(tmp_path: Path) -> None:
    env = {"SHOAL_HOME": str(tmp_path)}
    (tmp_path / "server.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "pid": 1}))
    assert (find_endpoint(env).url, find_endpoint(env).chosen_by) == ("http://127.0.0.1:1", "this machine")
    Credentials(tmp_path).use("https://a:1")
    assert (find_endpoint(env).url, find_endpoint(env).chosen_by) == ("https://a:1", "shoal login")
    named = {**env, "SHOAL_URL": "https://b:2", "SHOAL_TOKEN": "shl_b"}
    assert (find_endpoint(named).url, find_endpoint(named).chosen_by) == ("https://b:2", "SHOAL_URL")
    Credentials(tmp_path).save(LOCAL, "shl_l")
    here = find_endpoint(env_for_home(named))
    assert (here.url, here.token, here.is_local) == ("http://127.0.0.1:1", "shl_l", True)


def test_server_of_this_home_is_found_at_its_current_address(tmp_path: Path) -> None:
    Credentials(tmp_path).save(LOCAL, "shl_l")
    env = {"SHOAL_HOME": str(tmp_path)}
    for port in (1, 2):
        (tmp_path / "server.json").write_text(json.dumps({"url": f"http://127.0.0.1:{port}", "pid": 1}))
        endpoint = find_endpoint(env)
        assert (endpoint.url, endpoint.token, endpoint.is_local) == (
            f"http://127.0.0.1:{port}",
            "shl_l",
            True,
        )


def test_missing_server_error_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(ServerUnreachable) as caught:
        find_endpoint({"SHOAL_HOME": str(tmp_path)})
    assert "shoal up" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["{", "[]", '{"servers": 3}'])
def test_a_damaged_file_is_reported_and_not_overwritten(tmp_path: Path, text: str) -> None:
    path = tmp_path / "credentials.json"
    path.write_text(text)
    with pytest.raises(SpecError):
        Credentials(tmp_path).save(LOCAL, "shl_l")
    assert path.read_text() == text
