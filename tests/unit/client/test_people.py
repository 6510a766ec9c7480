"""Login, tokens, users, projects and their shares: what is sent, and what is printed."""

from __future__ import annotations

import io
import os

import pytest

from shoal.client.credentials import Credentials
from tests.support.fakes.api_server import TOKEN, FakeApiServer, Shell


def test_login_checks_the_token_before_it_saves_it(
    shell: Shell, fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SHOAL_URL", "SHOAL_TOKEN"):
        monkeypatch.delenv(name)
    me = {"user": "ana", "cluster_role": "admin", "projects": [{"name": "vision", "role": "lead"}]}
    fake.answers["GET", "/v1/me"] = [fake.problem(401, "unauthenticated", "not known"), me]
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{TOKEN}\n"))
    assert shell("login", fake.url).code == 4
    assert not Credentials(shell.home).path.exists()
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{TOKEN}\n"))
    result = shell("login", fake.url, "--token-stdin")
    assert result.code == 0
    assert result.out == f"you are ana (admin) at {fake.url}\n  vision: lead\n"
    assert Credentials(shell.home).token(fake.url) == TOKEN
    assert Credentials(shell.home).listener_uid(fake.url) == os.geteuid()
    assert Credentials(shell.home).load()["current"] == fake.url
    assert TOKEN not in result.out + result.err


def test_login_without_a_token_says_what_to_type(
    shell: Shell, fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    result = shell("login", fake.url)
    assert result.code == 2
    assert result.err.startswith("error: no token was given\n")
    assert f"`shoal login {fake.url}`" in result.err
    assert "--token-stdin" in result.err


def test_login_warns_that_a_variable_overrides_it(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "note: SHOAL_URL is set and takes precedence" in shell("login", "https://far:1").err


def test_a_new_token_is_alone_on_standard_output(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["POST", "/v1/tokens"] = (201, {"id": "tok_1", "text": "shl_tok_1_secret", "scope": "member"})
    result = shell("token", "create", "--user", "bob", "--lifetime", "30d", "--scope", "member")
    assert result.out == "shl_tok_1_secret\n"
    assert fake.requests[0].json() == {"user": "bob", "scope": "member", "lifetime_s": 2592000.0, "label": ""}


def test_token_for_a_missing_service_is_created_with_a_warning(shell: Shell, fake: FakeApiServer) -> None:
    token = {
        "id": "tok_1",
        "text": "shl_tok_1_secret",
        "scope": "viewer",
        "project": "lab",
        "service": "chat",
    }
    fake.answers["POST", "/v1/tokens"] = (201, token)
    fake.answers["GET", "/v1/services"] = [{"items": [], "next_cursor": None}, {"items": [{"name": "chat"}]}]
    command = ("token", "create", "--project", "lab", "--service", "chat")
    assert "there is no service `lab/chat` now" in shell(*command).err
    assert "there is no service" not in shell(*command).err


def test_revoke_says_when_a_data_plane_may_still_accept_the_token(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["DELETE", "/v1/tokens/tok_1"] = {"id": "tok_1", "is_confirmed": True}
    assert shell("token", "revoke", "tok_1").err == ""
    fake.answers["DELETE", "/v1/tokens/tok_1"] = {"id": "tok_1", "is_confirmed": False}
    late = shell("token", "revoke", "tok_1")
    assert (late.code, late.out) == (0, "token tok_1 revoked\n")
    assert "not every data plane has confirmed it" in late.err
    assert '"is_confirmed": false' in shell("token", "revoke", "tok_1", "--json").out


def test_people_commands_send_what_was_typed(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["POST", "/v1/users"] = (201, {"name": "bob", "cluster_role": None})
    fake.answers["PATCH", "/v1/users/bob"] = {"name": "bob"}
    fake.answers["POST", "/v1/projects"] = (201, {"name": "vision"})
    fake.answers["PUT", "/v1/projects/vision/members/bob"] = {
        "user": "bob",
        "project": "vision",
        "role": "lead",
    }
    fake.answers["DELETE", "/v1/projects/vision/members/bob"] = {"user": "bob", "project": "vision"}
    assert shell("user", "create", "bob").code == 0
    assert shell("user", "update", "bob", "--no-active", "--role", "none").code == 0
    assert shell("project", "create", "vision", "--max-open-jobs", "5").code == 0
    assert shell("project", "add", "vision", "bob", "--role", "lead").out == "bob is lead of vision\n"
    assert shell("project", "remove", "vision", "bob").code == 0
    bodies = [request.json() for request in fake.requests if request.body]
    assert bodies == [
        {"name": "bob", "cluster_role": None},
        {"cluster_role": None, "is_active": False},
        {"name": "vision", "max_open_jobs": 5},
        {"role": "lead"},
    ]


def test_a_projects_share_is_typed_as_numbers_of_devices(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["POST", "/v1/projects"] = (201, {"name": "vision"})
    fake.answers["PATCH", "/v1/projects/vision"] = {"name": "vision"}
    share = ("--quota", "64", "--weight", "2", "--limit", "gpus=128,cpus=512", "--borrow", "32")
    assert shell("project", "create", "vision", "--parent", "research", *share).out == "project vision made\n"
    assert shell("project", "update", "vision", "--quota", "none", "--borrow", "0").code == 0
    assert [request.json() for request in fake.requests if request.body] == [
        {
            "name": "vision",
            "parent": "research",
            "quota": {"gpus": 64},
            "borrow": {"gpus": 32},
            "limit": {"gpus": 128, "cpus": 512},
            "weight": 2.0,
        },
        {"quota": None, "borrow": {"gpus": 0, "cpus": 0}},
    ]


@pytest.mark.parametrize("typed", ["many", "gpus", "gpus=1.5", "tpus=4", "gpus=1,gpus=2", "-1", ""])
def test_a_quota_that_is_no_number_of_devices_is_refused(
    shell: Shell, fake: FakeApiServer, typed: str
) -> None:
    result = shell("project", "update", "vision", f"--quota={typed}")
    assert result.code == 2
    assert "write a number of GPUs, or `gpus=64,cpus=512`" in result.err
    assert not [request for request in fake.requests if request.method == "PATCH"]


def test_hidden_project_is_answered_with_the_nearest_name(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["GET", "/v1/projects"] = {"items": [{"name": "vision"}], "next_cursor": None}
    result = shell("project", "show", "visoin")
    assert result.code == 4
    assert "no project `visoin` that you may see; did you mean `vision`?" in result.err


def test_tokens_are_listed_below_their_parent_token(shell: Shell, fake: FakeApiServer) -> None:
    def token(name: str, parent: str | None, user: str = "ana") -> dict[str, object]:
        return {"id": name, "parent": parent, "user": user, "scope": "member", "label": ""}

    page = [token("tok_4", None), token("tok_3", "tok_2", "ben"), token("tok_2", "tok_1")]
    page += [token("tok_1", "tok_0")]
    fake.answers["GET", "/v1/tokens"] = {"items": page, "next_cursor": None}
    result = shell("token", "list")
    shown = [line.partition("member")[0].rstrip() for line in result.out.splitlines()[1:]]
    assert [" ".join(line.split()) for line in shown] == [
        "tok_4 ana",
        "tok_1 ana",
        "- tok_2 ana",
        "- - tok_3 ben",
    ]
    assert "is revoked with it" in result.err


def test_revoke_lists_the_tokens_that_ended_and_those_that_did_not(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["DELETE", "/v1/tokens/tok_1"] = [
        {"id": "tok_1", "revoked_with_it": ["tok_2", "tok_3"], "kept": []},
        {"id": "tok_1", "revoked_with_it": [], "kept": ["tok_2"]},
    ]
    assert shell("token", "revoke", "tok_1").out == "token tok_1 revoked, and 2 created with it\n"
    kept = shell("token", "revoke", "tok_1", "--keep-children")
    assert kept.out == "token tok_1 revoked\n"
    assert "1 created with it stay valid: tok_2" in kept.err
    assert fake.requests[-1].query == {"keep_children": ["true"]}
