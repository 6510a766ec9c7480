"""What every store must do with the event log: whole, in order, append-only, and able to prove it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import anyio
import pytest

from shoal.control.actor import SHOAL
from shoal.control.commands.audit import verify_transaction
from shoal.control.record import record_event
from shoal.errors import Bug, StateError
from shoal.model.job import ReplicaRef
from shoal.model.people import Membership, Project, Role, Token, User
from shoal.store import ChainFlaw, Event, EventFilter, LogHead, Store, Tx
from shoal.store.hash_chain import GENESIS, chain_hash
from shoal.wire import ProbeSpec
from tests.support.store_records import a_job, add_job

Tamper = Callable[[str], None]
"""Runs SQL on the database behind the store's back, with the triggers out of the way."""


class EventLogContract:
    """An implementation adds `store` and `tamper` fixtures and sets `__test__`."""

    __test__ = False

    async def test_event_comes_back_as_it_was_appended(self, store: Store) -> None:
        def change(tx: Tx) -> Event:
            return tx.events.append(
                "attempt.ended",
                at=1763180000.123456,
                actor="user:ana",
                project="vision",
                job_id="job_1",
                attempt_id="att_1",
                node="n1",
                data={"z": 1, "a": [1.5, None, "ü\x00\u2028"], "n": {"b": True}},
                request_id="req_1",
            )

        appended = await store.write(change)
        assert appended.seq == 1
        assert await store.read(lambda tx: tx.events.page(0)) == [appended]
        assert await store.read(lambda tx: tx.events.head()) == (1, appended.hash)

    async def test_empty_log_has_a_head_and_no_flaw(self, store: Store) -> None:
        assert await store.read(lambda tx: tx.events.head()) == LogHead(0, GENESIS)
        assert await store.read(lambda tx: tx.events.verify()) is None

    async def test_numbers_have_no_gap_when_changes_are_undone(self, store: Store) -> None:
        async def one(number: int) -> None:
            def change(tx: Tx) -> None:
                tx.events.append("a", at=1.0, actor="shoal", data={"n": number})
                tx.events.append("b", at=1.0, actor="shoal")
                if number % 2:
                    raise StateError("undone")

            with anyio.CancelScope():
                try:
                    await store.write(change)
                except StateError:
                    return

        async with anyio.create_task_group() as group:
            for number in range(30):
                group.start_soon(one, number)
        log = await store.read(lambda tx: tx.events.page(0, limit=100))
        assert [event.seq for event in log] == list(range(1, 31))
        assert sorted(event.data["n"] for event in log if event.kind == "a") == list(range(0, 30, 2))
        assert await store.read(lambda tx: tx.events.verify()) is None

    async def test_events_of_a_service_are_what_names_it_and_those_of_its_replicas(
        self, store: Store
    ) -> None:
        def change(tx: Tx) -> None:
            place = ReplicaRef(service_id="svc_1", service="chat", release=1, slot=1, probe=ProbeSpec())
            replica, alike = a_job(1, name="chat", replica=place), a_job(2, name="chat")
            add_job(tx, replica)
            add_job(tx, alike)
            log = partial(tx.events.append, at=1.0, actor="shoal")
            log("service.released", project="vision", data={"service": "chat", "spec": '{"service":"rank"}'})
            log("service.released", project="vision", data={"service": "chat-2"})
            log("replica.ready", project="vision", job_id=replica.job_id)
            log("attempt.ended", project="vision", job_id=alike.job_id)
            log("token.created", project="speech", data={"service": "chat"})
            log("service.released", project="vision", data={"service": "ch_t"})

        await store.write(change)

        async def numbers(wanted: EventFilter) -> list[int]:
            return [event.seq for event in await store.read(lambda tx: tx.events.page(0, wanted))]

        first = (await store.read(lambda tx: tx.events.head())).seq - 5
        assert await numbers(EventFilter(service="chat")) == [first, first + 2, first + 4]
        assert await numbers(EventFilter(service="chat", projects=("vision",))) == [first, first + 2]
        assert await numbers(EventFilter(service="rank")) == []
        assert await numbers(EventFilter(service="ch_t")) == [first + 5]

    async def test_pages_and_latest_follow_the_filter(self, store: Store) -> None:
        await store.write(_varied_events)
        cases = [
            (EventFilter(), [1, 2, 3, 4, 5]),
            (EventFilter(projects=("vision",)), [1, 2]),
            (EventFilter(projects=("vision", "speech")), [1, 2, 3]),
            (EventFilter(projects=()), []),
            (EventFilter(job_id="job_1"), [1, 2]),
            (EventFilter(node="n1"), [2, 4]),
            (EventFilter(kinds_prefix="job."), [1, 3]),
            (EventFilter(kinds_prefix="job_"), []),
            (EventFilter(kinds_prefix="%"), []),
            (EventFilter(without_ours=True), [1, 3, 4]),
            (EventFilter(without_ours=True, projects=("vision",)), [1]),
        ]
        for wanted, numbers in cases:
            page, latest = await store.read(partial(_page_and_latest, wanted=wanted))
            assert [event.seq for event in page] == numbers, wanted
            assert [event.seq for event in latest] == numbers[-2:], wanted
        assert [e.seq for e in await store.read(lambda tx: tx.events.page(2, limit=2))] == [3, 4]

    async def test_database_refuses_to_change_or_remove_an_event(self, store: Store) -> None:
        await store.write(_varied_events)
        for statement in (
            "UPDATE events SET actor = 'user:eve' WHERE seq = 2",
            "DELETE FROM events WHERE seq = 5",
            "INSERT INTO events (seq, hash, at, kind, actor, data) VALUES (5, 'x', 1, 'k', 'a', '{}')",
            "INSERT INTO events (seq, hash, at, kind, actor, data) VALUES (0, 'x', 1, 'k', 'a', '{}')",
        ):
            with pytest.raises(Bug, match="append-only"):
                await store.write(partial(_run, sql=statement))
        assert await store.read(lambda tx: tx.events.verify()) is None

    @pytest.mark.parametrize(
        ("sql", "bad"),
        [
            ("UPDATE events SET actor = 'user:eve' WHERE seq = 3", 3),
            ("UPDATE events SET at = at + 1 WHERE seq = 1", 1),
            ("UPDATE events SET data = '{}' WHERE seq = 2", 2),
            ("UPDATE events SET project = NULL WHERE seq = 2", 2),
            ("UPDATE events SET node = '' WHERE seq = 3", 3),
            ("DELETE FROM events WHERE seq = 4", 4),
            ("DELETE FROM events WHERE seq = 1", 1),
            ("DELETE FROM events WHERE seq IN (2, 3)", 2),
        ],
    )
    async def test_verify_names_the_first_entry_that_was_edited_or_removed(
        self, store: Store, tamper: Tamper, sql: str, bad: int
    ) -> None:
        await store.write(_varied_events)
        tamper(sql)
        flaw = await store.read(lambda tx: tx.events.verify())
        assert flaw is not None
        assert flaw.seq == bad

    async def test_tables_of_people_are_compared_with_the_log(self, store: Store, tamper: Tamper) -> None:
        token = Token(token_id="tok_1", user_id="usr_1", secret_hash=bytes(32), project="p", service="s")

        def begin(tx: Tx) -> None:
            tx.people.add_user(User(user_id="usr_1", name="ana"))
            tx.people.add_project(Project(name="p", uid=tx.people.next_uid()))
            tx.people.set_membership(
                Membership(user_id="usr_1", user_name="ana", project="p", role=Role.LEAD)
            )
            tx.tokens.add(token)
            record_event(tx, "user.created", 1.0, SHOAL)

        def go_on(tx: Tx) -> None:
            tx.tokens.revoke([token], 2.0)
            record_event(tx, "token.revoked", 2.0, SHOAL)
            tx.people.remove_membership("usr_1", "p")
            record_event(tx, "member.removed", 2.0, SHOAL)

        for change in (begin, go_on):
            await store.write(change)
            assert (await store.read(verify_transaction)).is_intact
        tamper("UPDATE tokens SET parent = 'tok_0'")
        tamper("INSERT INTO memberships VALUES ('usr_1', 'p', 'viewer')")
        tamper("DELETE FROM users")
        verdict = await store.read(verify_transaction)
        assert [(one.table, one.row, one.field) for one in verdict.differences] == [
            ("users", "usr_1", ""),
            ("memberships", "usr_1 in p", ""),
            ("tokens", "tok_1", "column parent"),
        ]

    async def test_change_that_was_undone_is_in_no_event(self, store: Store) -> None:
        def undone(tx: Tx) -> None:
            tx.people.add_user(User(user_id="usr_1", name="ana"))
            raise StateError("undone")

        def change(tx: Tx) -> None:
            tx.people.add_user(User(user_id="usr_2", name="ben"))
            record_event(tx, "user.created", 1.0, SHOAL)

        async with anyio.create_task_group() as group:  # one batch, where the store makes batches
            group.start_soon(_write_undone, store, undone)
            group.start_soon(store.write, change)
        assert (await store.read(verify_transaction)).is_intact
        (event,) = await store.read(lambda tx: tx.events.page(0))
        assert [one["user"]["user_id"] for one in event.data["changes"]] == ["usr_2"]

    async def test_verify_names_the_first_of_two_swapped_entries(self, store: Store, tamper: Tamper) -> None:
        await store.write(_varied_events)
        for move in ((3, 99), (4, 3), (99, 4)):
            tamper("UPDATE events SET seq = {1} WHERE seq = {0}".format(*move))
        flaw = await store.read(lambda tx: tx.events.verify())
        assert flaw is not None
        assert flaw.seq == 3

    async def test_verify_names_an_inserted_entry(self, store: Store, tamper: Tamper) -> None:
        await store.write(_varied_events)
        for seq in (5, 4, 3):
            tamper(f"UPDATE events SET seq = {seq + 1} WHERE seq = {seq}")
        tamper(
            "INSERT INTO events (seq, hash, at, kind, actor, data) "
            f"VALUES (3, '{'ab' * 32}', 1, 'node.drained', 'user:eve', '{{}}')"
        )
        flaw = await store.read(lambda tx: tx.events.verify())
        assert flaw is not None
        assert flaw.seq == 3

    async def test_verify_names_an_entry_that_was_added_without_the_key(
        self, store: Store, tamper: Tamper
    ) -> None:
        await store.write(_varied_events)
        head = await store.read(lambda tx: tx.events.head())
        texts = ("role.set", "user:eve", None, None, None, None, "{}", None)
        forged = chain_hash(b"of somebody else", head.hash, head.seq + 1, 1.0, *texts)
        tamper(
            "INSERT INTO events (seq, hash, at, kind, actor, data) "
            f"VALUES ({head.seq + 1}, '{forged}', 1, 'role.set', 'user:eve', '{{}}')"
        )
        flaw = await store.read(lambda tx: tx.events.verify())
        assert flaw is not None
        assert flaw.seq == head.seq + 1

    @pytest.mark.parametrize("seq", [0, -1, -(2**63)])
    @pytest.mark.parametrize("from_seq", [0, 2])
    async def test_verify_names_an_entry_before_the_first(
        self, store: Store, tamper: Tamper, seq: int, from_seq: int
    ) -> None:
        await store.write(_varied_events)
        tamper(
            "INSERT INTO events (seq, hash, at, kind, actor, data) "
            f"VALUES ({seq}, '{'ab' * 32}', 1, 'role.set', 'user:eve', '{{}}')"
        )
        flaw = await store.read(lambda tx: tx.events.verify(from_seq=from_seq))
        assert flaw == ChainFlaw(seq, "the entry was added: the log begins with entry 1")

    async def test_missing_tail_is_found_by_the_anchor_alone(self, store: Store, tamper: Tamper) -> None:
        await store.write(_varied_events)
        anchor = await store.read(lambda tx: tx.events.head())
        tamper("DELETE FROM events WHERE seq >= 4")
        assert await store.read(lambda tx: tx.events.verify()) is None
        flaw = await store.read(lambda tx: tx.events.verify(anchor=anchor))
        assert flaw is not None
        assert flaw.seq == 4
        assert "5" in flaw.reason

    async def test_log_that_is_not_the_anchored_one_is_found(self, store: Store) -> None:
        await store.write(_varied_events)
        flaw = await store.read(lambda tx: tx.events.verify(anchor=LogHead(2, "ab" * 32)))
        assert flaw == ChainFlaw(2, "the entry is not the one that the anchor remembers")

    async def test_anchor_behind_the_head_is_satisfied(self, store: Store) -> None:
        await store.write(_varied_events)
        anchor = await store.read(lambda tx: tx.events.head())
        await store.write(_varied_events)
        assert await store.read(lambda tx: tx.events.verify(anchor=anchor)) is None
        assert await store.read(lambda tx: tx.events.verify(anchor=LogHead(0, GENESIS))) is None

    async def test_verify_from_an_entry_trusts_what_came_before(self, store: Store, tamper: Tamper) -> None:
        await store.write(_varied_events)
        tamper("UPDATE events SET actor = 'user:eve' WHERE seq = 2")
        assert await store.read(lambda tx: tx.events.verify(from_seq=2)) is None
        missing = await store.read(lambda tx: tx.events.verify(from_seq=9))
        assert missing is not None
        assert missing.seq == 9

    async def test_long_log_is_verified_to_its_end(self, store: Store, tamper: Tamper) -> None:
        def change(tx: Tx) -> None:
            for n in range(2500):
                tx.events.append("a", at=float(n), actor="shoal")

        await store.write(change)
        assert await store.read(lambda tx: tx.events.verify()) is None
        tamper("UPDATE events SET kind = 'b' WHERE seq = 2500")
        flaw = await store.read(lambda tx: tx.events.verify())
        assert flaw is not None
        assert flaw.seq == 2500


def _page_and_latest(tx: Tx, wanted: EventFilter) -> tuple[list[Event], list[Event]]:
    return tx.events.page(0, wanted, 10), tx.events.latest(2, wanted)


def _run(tx: Tx, sql: str) -> None:
    """Below the repositories, which offer no way to do what this test tries."""
    tx.session.send(sql)


def _varied_events(tx: Tx) -> None:
    tx.events.append("job.submitted", at=1.0, actor="user:ana", project="vision", job_id="job_1")
    told = {"epoch": 1, "nodes": ["n1"]}
    tx.events.append(
        "attempt.placed", at=2.5, actor="shoal", project="vision", job_id="job_1", node="n1", data=told
    )
    tx.events.append("job.stopped", at=3.0, actor="user:bob", project="speech", job_id="job_2")
    tx.events.append("node.drained", at=4.0, actor="user:bob", node="n1", data={"because": "ü"})
    tx.events.append("node.seen", at=5.0, actor="shoal", node="n2", request_id="")


async def _write_undone(store: Store, change: Callable[[Tx], None]) -> None:
    with pytest.raises(StateError, match="undone"):
        await store.write(change)
