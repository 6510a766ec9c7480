"""Users, projects, members and tokens: no change locks everybody out, and a token's text is shown once."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.control import Actor, project_uids
from shoal.errors import NotFound, StateError
from shoal.identity import parse_user_token
from shoal.model.people import Role, User
from shoal.store import KeyReused
from tests.support.planes.bench import ANA, USER, ControlPlaneLab, result_in_loop, result_of


@pytest.fixture
def lab() -> ControlPlaneLab:
    return ControlPlaneLab()


def with_ben(lab: ControlPlaneLab, cluster_role: Role | None = None) -> User:
    return result_of(lab.plane.create_user(ANA, "ben", cluster_role))


def test_two_users_cannot_have_one_name(lab: ControlPlaneLab) -> None:
    with_ben(lab)
    with pytest.raises(StateError, match="user `ben` exists already"):
        with_ben(lab)
    assert len(lab.events("user.created")) == 1


def test_a_user_made_again_with_the_same_key_is_the_same_user(lab: ControlPlaneLab) -> None:
    first = result_of(lab.plane.create_user(ANA, "ben", key="k"))
    assert result_of(lab.plane.create_user(ANA, "ben", key="k")) == first
    with pytest.raises(KeyReused):
        result_of(lab.plane.create_user(ANA, "bea", key="k"))


@pytest.mark.parametrize("change", [{"is_active": False}, {"cluster_role": None}])
def test_last_active_admin_stays_admin(lab: ControlPlaneLab, change: dict[str, object]) -> None:
    with pytest.raises(StateError, match="this is the last active admin"):
        result_of(lab.plane.update_user(ANA, "ana", change))
    assert lab.read(lambda tx: tx.people.user_by_name("ana")) == USER
    assert lab.events("user.updated") == []


def test_an_admin_may_go_when_another_is_left(lab: ControlPlaneLab) -> None:
    with_ben(lab, Role.ADMIN)
    assert not result_of(lab.plane.update_user(ANA, "ana", {"is_active": False})).is_active
    with pytest.raises(StateError, match="last active admin"):
        result_of(lab.plane.update_user(ANA, "ben", {"cluster_role": Role.OPERATOR}))


def test_an_inactive_admin_does_not_count_as_one(lab: ControlPlaneLab) -> None:
    with_ben(lab, Role.ADMIN)
    result_of(lab.plane.update_user(ANA, "ben", {"is_active": False}))
    with pytest.raises(StateError, match="last active admin"):
        result_of(lab.plane.update_user(ANA, "ana", {"is_active": False}))


def test_a_project_gets_a_uid_of_its_own_and_keeps_its_name(lab: ControlPlaneLab) -> None:
    moon = result_in_loop(lab.plane.create_project(ANA, "moon", {"max_open_jobs": 5}))
    mars = result_in_loop(lab.plane.create_project(ANA, "mars", {}))
    assert (moon.max_open_jobs, mars.uid) == (5, moon.uid + 1)
    with pytest.raises(StateError, match="project `moon` exists already"):
        result_in_loop(lab.plane.create_project(ANA, "moon", {}))


def test_a_project_that_is_made_after_an_account_does_not_get_its_uid(
    lab: ControlPlaneLab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    moon = result_in_loop(lab.plane.create_project(ANA, "moon", {}))
    taken = moon.uid + 1
    monkeypatch.setattr(project_uids, "is_in_use", lambda uid: uid == taken)
    monkeypatch.setattr(project_uids, "REGISTRY", tmp_path)
    mars = result_in_loop(lab.plane.create_project(ANA, "mars", {}))
    venus = result_in_loop(lab.plane.create_project(ANA, "venus", {}))
    assert project_uids.first_of(mars.uid) != project_uids.first_of(taken)
    assert venus.uid == mars.uid + 1


def test_a_project_keeps_the_limits_that_are_not_changed(lab: ControlPlaneLab) -> None:
    result_in_loop(lab.plane.create_project(ANA, "moon", {"max_open_jobs": 5}))
    changed = result_of(lab.plane.update_project(ANA, "moon", {"max_priority": 7}))
    assert (changed.max_open_jobs, changed.max_priority) == (5, 7)
    with pytest.raises(NotFound, match="no project `mars`"):
        result_of(lab.plane.update_project(ANA, "mars", {"max_priority": 7}))


def test_a_member_is_set_changed_and_removed(lab: ControlPlaneLab) -> None:
    ben = with_ben(lab)
    for role in (Role.VIEWER, Role.LEAD):
        result_of(lab.plane.set_member(ANA, "lab", "ben", role))
        membership = lab.read(lambda tx: tx.people.membership(ben.user_id, "lab"))
        assert membership is not None
        assert membership.role is role
    result_of(lab.plane.remove_member(ANA, "lab", "ben"))
    assert lab.read(lambda tx: tx.people.membership(ben.user_id, "lab")) is None
    assert {event.project for event in lab.events("member.")} == {"lab"}


def test_a_membership_needs_a_user_and_a_project(lab: ControlPlaneLab) -> None:
    with pytest.raises(NotFound, match="no user `ben`"):
        result_of(lab.plane.set_member(ANA, "lab", "ben", Role.MEMBER))
    with_ben(lab)
    with pytest.raises(NotFound, match="no project `moon`"):
        result_of(lab.plane.set_member(ANA, "moon", "ben", Role.MEMBER))


def test_a_token_is_shown_once_and_kept_as_a_hash(lab: ControlPlaneLab) -> None:
    token, text = result_of(lab.plane.create_token(ANA, USER, label="ci", scope=Role.MEMBER, key="k"))
    assert text is not None
    halves = parse_user_token(text)
    assert halves is not None
    assert halves.matches(token)
    again, nothing = result_of(lab.plane.create_token(ANA, USER, label="ci", scope=Role.MEMBER, key="k"))
    assert (again, nothing) == (token, None)
    assert lab.read(lambda tx: tx.tokens.all()) == [token]
    assert halves.secret not in repr(lab.events())


def test_audit_names_the_created_and_the_revoked_token(lab: ControlPlaneLab) -> None:
    token, _ = result_of(lab.plane.create_token(ANA, USER, label="ci", scope=Role.MEMBER))
    result_of(lab.plane.revoke_token(ANA, token.token_id))
    assert [event.data["token"] for event in lab.events("token.")] == [token.token_id] * 2


def test_service_token_changes_are_events_of_its_project(lab: ControlPlaneLab) -> None:
    own_token, _ = result_of(lab.plane.create_token(ANA, USER, label="ci", scope=Role.MEMBER, project="lab"))
    token, _ = result_of(
        lab.plane.create_token(ANA, USER, label="ci", scope=Role.MEMBER, project="lab", service="chat")
    )
    for created in (own_token, token):
        result_of(lab.plane.revoke_token(ANA, created.token_id))
    recorded = [(event.kind, event.project, event.data["token"]) for event in lab.events()[-4:]]
    assert recorded == [
        ("token.created", None, own_token.token_id),
        ("token.created", "lab", token.token_id),
        ("token.revoked", None, own_token.token_id),
        ("token.revoked", "lab", token.token_id),
    ]


def test_a_token_ends_when_its_life_does(lab: ControlPlaneLab) -> None:
    token, _ = result_of(lab.plane.create_token(ANA, USER, label="", scope=Role.ADMIN, lifetime_s=60.0))
    assert token.expires_at == lab.clock.now() + 60.0


def test_a_token_is_revoked_once_and_stays_so(lab: ControlPlaneLab) -> None:
    token, _ = result_of(lab.plane.create_token(ANA, USER, label="", scope=Role.ADMIN))
    first, _ = result_of(lab.plane.revoke_token(ANA, token.token_id))
    lab.clock.advance(10)
    again, is_everywhere = result_of(lab.plane.revoke_token(ANA, token.token_id))
    assert again.token.revoked_at == first.token.revoked_at
    assert is_everywhere, "there is no service"
    with pytest.raises(NotFound, match="no token `tok_none`"):
        result_of(lab.plane.revoke_token(ANA, "tok_none"))


def test_a_refused_attempt_is_in_the_audit_with_its_request(lab: ControlPlaneLab) -> None:
    stranger = Actor(kind="user", id="usr_eve", name="eve", request_id="req_1")
    result_of(lab.plane.record_denied(stranger, "job.stop", {"job": "lab/1"}))
    (event,) = lab.events("access.denied")
    assert (event.actor, event.request_id) == ("user:eve", "req_1")
    assert event.data == {"what": "job.stop", "job": "lab/1"}


@pytest.mark.parametrize("kind,text", [("user", "user:ana"), ("job", "job:ana"), ("shoal", "shoal")])
def test_an_actor_is_recorded_by_kind_and_name(kind: str, text: str) -> None:
    assert str(Actor(kind=kind, id="x", name="ana")) == text
