"""The audit: refusals go into the log, and the log is proved.

The proof consists of the chain of events, the anchors, and a comparison of the tables of people with the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import msgspec
import structlog

from shoal.control.actor import Actor
from shoal.control.capabilities import Anchors, Records
from shoal.control.commands.policy import POLICY_KEY as POLICY
from shoal.control.loops.anchor import AnchorRecord, anchor_path, copy_path, read_anchors
from shoal.control.memory.refusals import Refusals
from shoal.control.record import record_event
from shoal.errors import StateError, StoreUnavailable
from shoal.identity.replay import Difference, IdentityReplay
from shoal.model.people import Project, Token, User
from shoal.store import ChainFlaw, LogHead, Store, Tx, logged_token

log = structlog.get_logger()
MAX_DIFFERENCES = 100
"""Differences that are named. Further ones are counted."""


class AuditVerdict(msgspec.Struct, frozen=True, kw_only=True):
    head: LogHead
    flaw: ChainFlaw | None = None
    """The first entry that is not what was written. Tables are compared only if there is none."""
    differences: tuple[Difference, ...] = ()
    num_differences: int = 0
    anchors: tuple[AnchorRecord, ...] = ()
    anchor_problem: str = ""
    """Why an anchor is forged or damaged."""

    @property
    def is_intact(self) -> bool:
        return self.flaw is None and not self.num_differences and not self.anchor_problem


async def verify_audit(anchors: Anchors, store: Store) -> AuditVerdict:
    """Read the whole log in one transaction while work goes on. Memory grows with the tables alone."""
    problem = ""
    try:
        remembered = tuple(await read_anchors(anchors))
    except StateError as error:
        problem = error.message
        places = (anchor_path(anchors), copy_path(anchors))
        remembered = tuple(AnchorRecord(Path(path), problem=problem) for path in places if path is not None)
    verdict = await store.read(lambda tx: verify_transaction(tx, remembered))
    return msgspec.structs.replace(verdict, anchors=remembered, anchor_problem=problem)


def verify_transaction(tx: Tx, anchors: tuple[AnchorRecord, ...] = ()) -> AuditVerdict:
    """Verify the log within one transaction."""
    replay, unreadable = IdentityReplay(), []

    def see(seq: int, kind: str, data: str) -> None:
        try:
            replay.apply_event(seq, kind, data)
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
            unreadable.append(ChainFlaw(seq, f"its changes of people cannot be read: {error}"))

    head = tx.events.head()
    flaw = tx.events.verify(on_entry=see) or next(iter(unreadable), None)
    for anchor in anchors:
        if flaw is None and anchor.head is not None:
            flaw = tx.events.verify_anchor(anchor.head)
    if flaw is not None:
        return AuditVerdict(head=head, flaw=flaw)
    mismatches = differences(tx, replay)
    named = tuple(islice(mismatches, MAX_DIFFERENCES))
    return AuditVerdict(head=head, differences=named, num_differences=len(named) + sum(1 for _ in mismatches))


def differences(tx: Tx, replay: IdentityReplay) -> Iterator[Difference]:
    """Yield what the tables have and the log has not, and the other way round."""
    people = tx.people
    policy = tx.meta.get(POLICY)
    return chain(
        replay.compare_users((key, name, _read(body, User)) for key, name, body in people.raw_users()),
        replay.compare_projects((key, uid, _read(body, Project)) for key, uid, body in people.raw_projects()),
        replay.compare_members(people.raw_memberships()),
        replay.compare_tokens(
            (key, {"user_id": user, "parent": parent, **_service(service)}, _token(body))
            for key, user, parent, service, body in tx.tokens.raw()
        ),
        replay.compare_policy(_read(policy, dict) if policy is not None else None),
    )


def _service(column: str | None) -> dict[str, str | None]:
    """Return the field that the column repeats after the project's name."""
    return {"service": column.partition("/")[2] if column is not None else None}


def _token(body: str) -> Token | None:
    token = _read(body, Token)
    return logged_token(token) if token is not None else None


def _read(body: str, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError:
        return None


async def write_refusals(records: Records, refusals: Refusals, *, is_all: bool = False) -> None:
    """Write the counts that are due into the log, in one transaction. If that fails, they are counted on."""
    taken = refusals.take(is_all=is_all)
    if not taken:
        return

    def change(tx: Tx) -> None:
        for refused in taken:
            record_event(tx, "access.denied", records.clock.now(), refused.actor, data=refused.event_data())

    try:
        await records.store.write(change)
    except StoreUnavailable as error:
        refusals.put_back(taken)
        log.warning("audit.late", callers=len(taken), error=error.message)


async def record_denied(records: Records, actor: Actor, action: str, facts: dict[str, Any]) -> None:
    """Record for the audit that the actor lacked the permission for what it tried."""
    now, data = records.clock.now(), {"what": action, **facts}
    await records.store.write(lambda tx: record_event(tx, "access.denied", now, actor, data=data))
