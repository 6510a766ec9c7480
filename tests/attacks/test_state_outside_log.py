"""Row 59: a change in the database without an event is named, whichever table it is in."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.control.commands.policy import declare_policy
from shoal.local_sockets import FIRST_PROJECT_UID
from shoal.settings import ServerLimits
from tests.support.planes.world import ApiWorld, open_world

Tamper = Callable[[sqlite3.Connection], object]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ApiWorld]:
    with open_world(tmp_path, is_durable=True, limits=ServerLimits()) as opened:
        yield opened


def sql(*statements: str) -> Tamper:
    def run(file: sqlite3.Connection) -> None:
        for statement in statements:
            assert file.execute(statement).rowcount > 0, f"changed nothing: {statement}"

    return run


BEN = "(select user_id from users where name = 'ben')"
CASES: dict[str, tuple[Tamper, str, str, str, str]] = {
    "made himself admin": (
        sql("update users set body = json_set(body, '$.cluster_role', 'admin') where name = 'ben'"),
        *("users", "cluster_role", "admin", "None"),
    ),
    "opened a closed account": (
        sql("update users set body = json_set(body, '$.is_active', json('true')) where name = 'closed'"),
        *("users", "is_active", "True", "False"),
    ),
    "took another's name": (
        sql("update users set name = 'ben2' where name = 'ben'"),
        *("users", "column name", "ben2", "ben"),
    ),
    "a user nobody made": (
        sql(
            """insert into users values ('usr_x', 'eve',
            '{"user_id":"usr_x","name":"eve","cluster_role":"admin"}')"""
        ),
        *("users", "", "there", "not there"),
    ),
    "a user who is gone": (
        sql("delete from users where name = 'cy'"),
        *("users", "", "not there", "there"),
    ),
    "a raised role": (
        sql(f"update memberships set role = 'lead' where user_id = {BEN}"),
        *("memberships", "role", "lead", "member"),
    ),
    "a role nobody gave": (
        sql(f"insert into memberships values ({BEN}, 'speech', 'lead')"),
        *("memberships", "", "there, as lead,", "not there"),
    ),
    "a role that was taken away": (
        sql("insert into memberships select user_id, 'vision', 'lead' from users where name = 'left'"),
        *("memberships", "", "there, as lead,", "not there"),
    ),
    "a membership that is gone": (
        sql(f"delete from memberships where user_id = {BEN}"),
        *("memberships", "", "not there", "there"),
    ),
    "a raised quota": (
        sql("update projects set body = json_set(body, '$.max_priority', 100000) where name = 'vision'"),
        *("projects", "max_priority", "100000", "100"),
    ),
    "another project's Unix user": (
        sql("update projects set uid = 1 where name = 'vision'"),
        *("projects", "column uid", "1", str(FIRST_PROJECT_UID)),
    ),
    "a token of one's own": (
        sql(f"insert into tokens select 'tok_x', {BEN}, body, null, null from tokens limit 1"),
        *("tokens", "", "there", "not there"),
    ),
    "a token with another secret": (
        sql(f"update tokens set body = json_set(body, '$.secret_hash', 'AAAA') where user_id = {BEN}"),
        *("tokens", "secret_hash", "", ""),
    ),
    "a wider token": (
        sql("update tokens set body = json_set(body, '$.scope', 'admin') where body like '%narrow%'"),
        *("tokens", "scope", "admin", "viewer"),
    ),
    "a token of another user": (
        sql("update tokens set user_id = 'usr_x' where body like '%narrow%'"),
        *("tokens", "column user_id", "usr_x", ""),
    ),
    "a token that ends later": (
        sql("update tokens set body = json_set(body, '$.expires_at', null) where body like '%narrow%'"),
        *("tokens", "expires_at", "None", ""),
    ),
    "a revoked token that lives": (
        sql("update tokens set body = json_set(body, '$.revoked_at', null) where body like '%below%'"),
        *("tokens", "revoked_at", "None", ""),
    ),
    "a token cut from its tree": (
        sql("update tokens set parent = null where body like '%narrow%'"),
        *("tokens", "column parent", "None", ""),
    ),
    "a row that cannot be read": (
        sql("update users set body = '{' where name = 'ben'"),
        *("users", "", "not readable", "there"),
    ),
    "another policy": (
        sql("update meta set value = json_set(value, '$.max_evictions', 999) where key = 'policy'"),
        *("meta", "max_evictions", "999", "5"),
    ),
}


def prepare(world: ApiWorld) -> None:
    """Prepare a deactivated user, one who left, a narrow token, and one that was revoked with its parent."""

    def call(method: str, path: str, **data: Any) -> Any:
        answer = world.call(method, path, role="admin", data=data)
        assert answer.status < 300, answer.body
        return answer.json()

    world.portal.call(declare_policy, world.plane.core.records, world.plane.core.planning.planner)
    for name in ("closed", "left"):
        call("POST", "/v1/users", name=name)
    call("PATCH", "/v1/users/closed", is_active=False)
    call("PUT", "/v1/projects/vision/members/left", role="viewer")
    call("DELETE", "/v1/projects/vision/members/left")
    call("PATCH", "/v1/projects/speech", quota={"gpus": 2})
    call("POST", "/v1/tokens", label="narrow", scope="viewer", lifetime_s=1e6, user="ben")
    above = call("POST", "/v1/tokens", label="above")
    middle = world.call("POST", "/v1/tokens", token=above["text"], data={"label": "middle"}).json()
    world.call("POST", "/v1/tokens", token=middle["text"], data={"label": "kept"})
    world.call("POST", "/v1/tokens", token=above["text"], data={"label": "below"})
    world.call("DELETE", f"/v1/tokens/{middle['id']}?keep_children=true", role="admin")
    call("DELETE", f"/v1/tokens/{above['id']}")


def verify(world: ApiWorld) -> Any:
    return world.call("GET", "/v1/audit/verify", role="operator").json()


def test_each_change_without_an_event_is_named_and_nothing_else(world: ApiWorld, tmp_path: Path) -> None:
    """All cases share one world: each is put back before the next."""
    prepare(world)
    verdict = verify(world)
    assert verdict["is_intact"], verdict
    for name, (tamper, table, field, in_table, in_log) in CASES.items():
        before = sqlite3.connect(":memory:")
        with sqlite3.connect(tmp_path / "shoal.db") as file:
            file.backup(before)
            tamper(file)
        verdict = verify(world)
        assert (verdict["is_intact"], verdict["first_bad"]) == (False, None), name
        differences = {
            (difference["table"], difference["field"]): difference for difference in verdict["differences"]
        }
        assert (table, field) in differences, (name, verdict)
        difference = differences[table, field]
        assert difference["in_table"] == in_table or not in_table, (name, difference)
        assert difference["in_log"] == in_log or not in_log, (name, difference)
        assert {difference["table"] for difference in verdict["differences"]} == {table}, name
        assert difference["because"] == verdict["because"] or len(verdict["differences"]) > 1
        with sqlite3.connect(tmp_path / "shoal.db") as file:
            for row in ("users", "projects", "memberships", "tokens", "meta"):
                file.execute(f"delete from {row}")
                rows = before.execute(f"select * from {row}").fetchall()
                file.executemany(f"insert into {row} values ({','.join('?' * len(rows[0]))})", rows)
        before.close()
        assert verify(world)["is_intact"], name


def test_no_event_shows_a_token_or_its_hash(world: ApiWorld) -> None:
    """Data planes know a token's owner by the hash of its secret, and many people read events."""
    prepare(world)
    shown = world.call("GET", "/v1/events?limit=1000", role="admin").body.decode()
    for token in world.read(lambda tx: tx.tokens.all()):
        assert token.secret_hash.hex() not in shown
