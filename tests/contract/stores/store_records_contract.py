"""What every store must do with nodes, services, idempotency keys, secrets, settings and people."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from msgspec.structs import replace

from shoal.errors import NotFound, StateError
from shoal.local_sockets import FIRST_PROJECT_UID
from shoal.model.node import Gpu, NodeState
from shoal.model.people import Membership, Project, Role, Token, User
from shoal.model.service import Release, Replica, Rollout, RolloutStage, Service
from shoal.store import KeyReused, StaleRecord, Store, Tx
from tests.support.store_records import a_job, a_node, a_window, an_attempt


class RecordsContract:
    """The part of `StoreContract` that is not about jobs and attempts."""

    __test__ = False

    # --- nodes --------------------------------------------------------------------------------

    async def test_node_is_put_whole_guarded_by_version_and_removed(self, store: Store) -> None:
        first = a_node("n2")
        gpus = (Gpu(index=0, kind="H100", memory_bytes=80 << 30),)
        facts = replace(first.facts, gpus=gpus, labels={"rack": "r1", "fabric": "f"})
        second = replace(first, facts=facts, state=NodeState.DRAINING, because="bad NVLink", version=2)

        def change(tx: Tx) -> None:
            tx.nodes.put(first)
            tx.nodes.put(a_node("n1"))
            tx.nodes.put(second)

        await store.write(change)
        assert await store.read(lambda tx: tx.nodes.get("n2")) == second
        assert await store.read(lambda tx: tx.nodes.all()) == [a_node("n1"), second]
        with pytest.raises(StaleRecord, match="n2"):
            await store.write(lambda tx: tx.nodes.put(second))
        await store.write(lambda tx: tx.nodes.remove("n2"))
        await store.write(lambda tx: tx.nodes.remove("n2"))
        assert await store.read(lambda tx: tx.nodes.get("n2")) is None

    # --- services -----------------------------------------------------------------------------

    async def test_service_is_one_of_its_name_guarded_by_version_and_goes_with_its_releases(
        self, store: Store
    ) -> None:
        chat = Service(
            service_id="svc_1",
            project="p",
            name="chat",
            owner="u",
            owner_name="ana",
            min_replicas=0,
            max_replicas=2,
            replicas=1,
            scaled_at=1.0,
            created_at=1.0,
        )
        first, second = (
            Release(service_id="svc_1", number=number, spec_json="{}", created_at=1.0) for number in (1, 2)
        )

        def add(tx: Tx) -> None:
            tx.services.add(chat)
            tx.services.add_release(second)
            tx.services.add_release(first)

        await store.write(add)
        with pytest.raises(StateError, match="p/chat"):
            await store.write(lambda tx: tx.services.add(replace(chat, service_id="svc_2")))
        rolled = replace(
            chat, version=2, rollout=Rollout(old=1, new=2, stage=RolloutStage.CANARY, share=0.05, since=2.0)
        )
        await store.write(lambda tx: tx.services.update(rolled))
        with pytest.raises(StaleRecord, match="p/chat"):
            await store.write(lambda tx: tx.services.update(rolled))
        assert await store.read(lambda tx: tx.services.by_name("p", "chat")) == rolled
        assert await store.read(lambda tx: tx.services.releases("svc_1")) == [first, second]
        assert await store.read(lambda tx: tx.services.release("svc_1", 2)) == second
        await store.write(lambda tx: tx.services.remove("svc_1"))
        assert await store.read(lambda tx: (tx.services.all(), tx.services.releases("svc_1"))) == ([], [])

    async def test_replicas_come_with_their_jobs_and_newest_attempts(self, store: Store) -> None:
        job = a_job(1)
        attempt = an_attempt(job)
        replica = Replica(
            replica_id=job.job_id, service_id="svc_1", release=1, slot=1, created_at=1.0, address="h:1"
        )

        def add(tx: Tx) -> None:
            tx.submissions.admit(job.project, 1)
            tx.submissions.add([(job, attempt)])
            tx.services.add_replica(replica)

        await store.write(add)
        ready = replace(replica, is_ready=True, ready_at=2.0)
        await store.write(lambda tx: tx.services.set_replica(ready))
        assert await store.read(lambda tx: tx.services.replicas("svc_1")) == [(ready, job, attempt)]
        assert await store.read(lambda tx: tx.services.replicas("svc_2")) == []
        await store.write(lambda tx: tx.services.drop_replica(job.job_id))
        await store.write(lambda tx: tx.services.set_replica(ready))
        assert await store.read(lambda tx: tx.services.replica(job.job_id)) is None

    # --- windows ------------------------------------------------------------------------------

    async def test_windows_are_listed_in_order_until_they_are_over_or_removed(self, store: Store) -> None:
        late, soon, over = a_window("w1", 300.0), a_window("w2", 200.0), a_window("w3", 50.0)

        def change(tx: Tx) -> None:
            for window in (late, soon, over):
                tx.windows.add(window)

        await store.write(change)
        assert await store.read(lambda tx: tx.windows.open(110.0)) == [soon, late]
        assert await store.read(lambda tx: tx.windows.get("w3")) == over
        await store.write(lambda tx: tx.windows.purge(110.0))
        assert await store.read(lambda tx: tx.windows.open(0.0)) == [soon, late]
        await store.write(lambda tx: tx.windows.remove("w2"))
        await store.write(lambda tx: tx.windows.remove("w2"))
        assert await store.read(lambda tx: tx.windows.get("w2")) is None

    # --- idempotency keys, secrets, settings --------------------------------------------------

    async def test_key_is_recalled_for_the_same_request_and_refused_for_another(self, store: Store) -> None:
        await store.write(lambda tx: tx.keys.remember("user:ana", "k", "f1", b"\x00answer\xff", 5.0))
        assert await store.read(lambda tx: tx.keys.recall("user:ana", "k", "f1")) == b"\x00answer\xff"
        assert await store.read(lambda tx: tx.keys.recall("user:bob", "k", "f2")) is None
        with pytest.raises(KeyReused) as caught:
            await store.read(lambda tx: tx.keys.recall("user:ana", "k", "f2"))
        assert caught.value.code == "idempotency.mismatch"

    async def test_old_keys_are_purged(self, store: Store) -> None:
        def change(tx: Tx) -> int:
            for n in range(4):
                tx.keys.remember("user:ana", f"k{n}", "f", b"", float(n))
            return tx.keys.purge(2.0, 10)

        assert await store.write(change) == 2
        assert await store.read(lambda tx: tx.keys.recall("user:ana", "k1", "f")) is None
        assert await store.read(lambda tx: tx.keys.recall("user:ana", "k2", "f")) == b""

    async def test_sealed_secret_is_replaced_and_dropped(self, store: Store) -> None:
        await store.write(lambda tx: tx.secrets.put("job_1", b"\x00one"))
        await store.write(lambda tx: tx.secrets.put("job_1", b"two"))
        assert await store.read(lambda tx: tx.secrets.get("job_1")) == b"two"
        await store.write(lambda tx: tx.secrets.drop("job_1"))
        await store.write(lambda tx: tx.secrets.drop("job_1"))
        assert await store.read(lambda tx: tx.secrets.get("job_1")) is None

    async def test_setting_is_replaced(self, store: Store) -> None:
        await store.write(lambda tx: tx.meta.set("cluster", "one"))
        await store.write(lambda tx: tx.meta.set("cluster", "two"))
        assert await store.read(lambda tx: tx.meta.get("cluster")) == "two"
        assert await store.read(lambda tx: tx.meta.get("nothing")) is None

    # --- people -------------------------------------------------------------------------------

    async def test_users_are_found_by_id_and_name_and_names_are_taken_once(self, store: Store) -> None:
        ana = User(user_id="usr_2", name="ana", cluster_role=Role.ADMIN, created_at=1.5)
        zoe = User(user_id="usr_1", name="zoe")

        def change(tx: Tx) -> None:
            tx.people.add_user(zoe)
            tx.people.add_user(ana)
            tx.people.update_user(replace(zoe, is_active=False))

        await store.write(change)
        assert await store.read(lambda tx: tx.people.get_user("usr_2")) == ana
        assert await store.read(lambda tx: tx.people.user_by_name("ana")) == ana
        assert await store.read(lambda tx: tx.people.user_by_name("Ana")) is None
        assert await store.read(lambda tx: tx.people.users()) == [ana, replace(zoe, is_active=False)]
        with pytest.raises(StateError, match="`ana`"):
            await store.write(lambda tx: tx.people.add_user(User(user_id="usr_3", name="ana")))
        with pytest.raises(NotFound):
            await store.write(lambda tx: tx.people.update_user(User(user_id="usr_9", name="bob")))

    async def test_project_keeps_its_uid_and_uids_are_never_given_twice(self, store: Store) -> None:
        def change(tx: Tx) -> list[int]:
            uids = [tx.people.next_uid(), tx.people.next_uid()]
            tx.people.add_project(Project(name="vision", uid=uids[0]))
            tx.people.update_project(Project(name="vision", uid=uids[0], max_open_jobs=5))
            return uids

        first = FIRST_PROJECT_UID
        assert await store.write(change) == [first, first + 1]
        assert await store.write(lambda tx: tx.people.next_uid()) == first + 2
        vision = Project(name="vision", uid=first, max_open_jobs=5)
        assert await store.read(lambda tx: tx.people.get_project("vision")) == vision
        assert await store.read(lambda tx: tx.people.projects()) == [vision]
        with pytest.raises(StateError, match="`vision`"):
            await store.write(lambda tx: tx.people.add_project(replace(vision, uid=first + 9)))
        with pytest.raises(NotFound):
            await store.write(lambda tx: tx.people.update_project(replace(vision, uid=1)))

    async def test_uids_begin_where_the_home_s_block_does(self, store: Store) -> None:
        await store.write(lambda tx: tx.people.begin_uids(FIRST_PROJECT_UID + 4_096))
        assert await store.write(lambda tx: tx.people.next_uid()) == FIRST_PROJECT_UID + 4_096
        assert await store.write(lambda tx: tx.people.next_uid()) == FIRST_PROJECT_UID + 4_097

    async def test_memberships_are_set_changed_listed_and_removed(self, store: Store) -> None:
        def change(tx: Tx) -> None:
            for user_id, name in (("usr_1", "zoe"), ("usr_2", "ana")):
                tx.people.add_user(User(user_id=user_id, name=name))
                for project in ("vision", "speech"):
                    tx.people.set_membership(_member(user_id, name, project, Role.VIEWER))
            tx.people.set_membership(_member("usr_1", "zoe", "vision", Role.LEAD))
            tx.people.remove_membership("usr_2", "speech")

        await store.write(change)
        zoe_leads = _member("usr_1", "zoe", "vision", Role.LEAD)
        ana_views = _member("usr_2", "ana", "vision", Role.VIEWER)
        zoe_views = _member("usr_1", "zoe", "speech", Role.VIEWER)
        assert await store.read(lambda tx: tx.people.membership("usr_1", "vision")) == zoe_leads
        assert await store.read(lambda tx: tx.people.membership("usr_2", "speech")) is None
        assert await store.read(lambda tx: tx.people.memberships()) == [zoe_views, ana_views, zoe_leads]
        assert await store.read(lambda tx: tx.people.memberships(user_id="usr_2")) == [ana_views]
        assert await store.read(lambda tx: tx.people.memberships(project="speech")) == [zoe_views]

    async def test_token_is_kept_as_a_hash_and_revoked_once(self, store: Store) -> None:
        token = Token(token_id="tok_1", user_id="usr_1", secret_hash=b"\x00\xff" * 16, project="vision")

        def change(tx: Tx) -> None:
            tx.tokens.add(token)
            tx.tokens.add(replace(token, token_id="tok_2", user_id="usr_2"))

        await store.write(change)
        assert await store.read(lambda tx: tx.tokens.get("tok_1")) == token
        assert [t.token_id for t in await store.read(lambda tx: tx.tokens.all())] == ["tok_1", "tok_2"]
        assert [t.token_id for t in await store.read(lambda tx: tx.tokens.of_user("usr_2"))] == ["tok_2"]
        for at in (9.0, 10.0):
            await store.write(partial(_revoke, at))
        again = await store.read(lambda tx: tx.tokens.get("tok_1"))
        assert again == replace(token, revoked_at=9.0)

    async def test_tokens_are_a_tree_that_is_walked_to_its_leaves(self, store: Store) -> None:
        def token(number: int, parent: int | None, user: str = "usr_1") -> Token:
            above = f"tok_{parent}" if parent else None
            return Token(token_id=f"tok_{number}", user_id=user, secret_hash=bytes(32), parent=above)

        made = [token(1, None), token(2, 1), token(3, 2), token(4, 2, "usr_2"), token(5, None)]
        await store.write(partial(_add_tokens, made))

        def below(tx: Tx) -> list[str]:
            return [one.token_id for one in tx.tokens.descendants("tok_1")]

        assert await store.read(below) == ["tok_2", "tok_3", "tok_4"]
        assert await store.read(lambda tx: tx.tokens.created_by_tokens_of("usr_1", 9)) == [made[3]]
        await store.write(lambda tx: tx.tokens.reparent(tx.tokens.children("tok_2"), "tok_5"))
        assert await store.read(below) == ["tok_2"]
        assert [one.token_id for one in await store.read(lambda tx: tx.tokens.children("tok_5"))] == [
            "tok_3",
            "tok_4",
        ]
        await store.write(lambda tx: tx.tokens.remove(["tok_2", "tok_3"]))
        assert [one.token_id for one in await store.read(lambda tx: tx.tokens.all())] == [
            "tok_1",
            "tok_4",
            "tok_5",
        ]

    async def test_circle_of_tokens_ends_the_walk(self, store: Store) -> None:
        made = [
            Token(token_id=one, user_id="usr_1", secret_hash=bytes(32), parent=of)
            for one, of in (("tok_1", "tok_2"), ("tok_2", "tok_1"))
        ]
        await store.write(partial(_add_tokens, made))
        assert len(await store.read(lambda tx: tx.tokens.descendants("tok_1"))) == 2

    async def test_generation_changes_when_somebody_may_have_lost_a_right(self, store: Store) -> None:
        token = Token(token_id="tok_1", user_id="usr_1", secret_hash=bytes(32))
        user = User(user_id="usr_1", name="zoe")
        changes: list[Callable[[Tx], object]] = [
            lambda tx: tx.people.update_user(replace(user, is_active=False)),
            lambda tx: tx.people.set_membership(_member("usr_1", "zoe", "vision", Role.LEAD)),
            lambda tx: tx.people.remove_membership("usr_1", "vision"),
            lambda tx: tx.tokens.revoke([token], 1.0),
        ]

        def begin(tx: Tx) -> None:
            tx.people.add_user(user)
            tx.tokens.add(token)

        await store.write(begin)
        for change in changes:
            before = await store.read(lambda tx: tx.people.generation())
            await store.write(change)
            assert await store.read(lambda tx: tx.people.generation()) != before


def _add_tokens(tokens: list[Token], tx: Tx) -> None:
    for token in tokens:
        tx.tokens.add(token)


def _revoke(at: float, tx: Tx) -> None:
    token = tx.tokens.get("tok_1")
    assert token is not None
    tx.tokens.revoke([token], at)


def _member(user_id: str, name: str, project: str, role: Role) -> Membership:
    return Membership(user_id=user_id, user_name=name, project=project, role=role)
