"""The audit: what was refused goes into the log, and the log is proved.

Its proof: the chain of events, the anchors, and the tables of people compared with what the log says of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import msgspec
import structlog

from shoal.control.anchor import KnownAnchor, anchor_path, copy_path, known_anchors
from shoal.control.core import Core
from shoal.control.policy import KEY as POLICY
from shoal.control.record import note
from shoal.errors import StateError, StoreUnavailable
from shoal.identity.replay import Difference, Replay
from shoal.model.people import Project, Token, User
from shoal.store import Flaw, Head, Tx, logged_token

log = structlog.get_logger()
MAX_DIFFERENCES = 100
"""Named at most; the others are counted."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    head: Head
    flaw: Flaw | None = None
    """The first entry that is not what was written. Tables are compared only where there is none."""
    differences: tuple[Difference, ...] = ()
    num_differences: int = 0
    anchors: tuple[KnownAnchor, ...] = ()
    anchor_problem: str = ""
    """A place with a forged or damaged anchor."""

    @property
    def is_intact(self) -> bool:
        return self.flaw is None and not self.num_differences and not self.anchor_problem


async def verify(core: Core) -> Verdict:
    """Read the whole log in one transaction, while work goes on. Memory grows with the tables alone."""
    problem = ""
    try:
        anchors = tuple(await known_anchors(core))
    except StateError as error:
        problem = error.message
        places = (anchor_path(core), copy_path(core))
        anchors = tuple(KnownAnchor(Path(path), problem=problem) for path in places if path is not None)
    verdict = await core.store.read(lambda tx: verdict_of(tx, anchors))
    return msgspec.structs.replace(verdict, anchors=anchors, anchor_problem=problem)


def verdict_of(tx: Tx, anchors: tuple[KnownAnchor, ...] = ()) -> Verdict:
    """Of one transaction."""
    replay, unreadable = Replay(), []

    def see(seq: int, kind: str, data: str) -> None:
        try:
            replay.see(seq, kind, data)
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
            unreadable.append(Flaw(seq, f"what it says of people cannot be read: {error}"))

    head = tx.events.head()
    flaw = tx.events.verify(see=see) or next(iter(unreadable), None)
    for known in anchors:
        if flaw is None and known.head is not None:
            flaw = tx.events.verify_anchor(known.head)
    if flaw is not None:
        return Verdict(head=head, flaw=flaw)
    found = differences(tx, replay)
    named = tuple(islice(found, MAX_DIFFERENCES))
    return Verdict(head=head, differences=named, num_differences=len(named) + sum(1 for _ in found))


def differences(tx: Tx, replay: Replay) -> Iterator[Difference]:
    """What the tables have and the log has not, and the other way round."""
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
    """The field that the column repeats, after the project's name."""
    return {"service": column.partition("/")[2] if column is not None else None}


def _token(body: str) -> Token | None:
    token = _read(body, Token)
    return logged_token(token) if token is not None else None


def _read(body: str, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError:
        return None


async def write_refusals(core: Core, *, is_all: bool = False) -> None:
    """Put what is due into the log, in one transaction. What cannot be written now is counted on."""
    taken = core.refusals.take(is_all=is_all)
    if not taken:
        return

    def change(tx: Tx) -> None:
        for refused in taken:
            note(tx, "access.denied", core.clock.now(), refused.actor, data=refused.told())

    try:
        await core.store.write(change)
    except StoreUnavailable as error:
        core.refusals.put_back(taken)
        log.warning("audit.late", callers=len(taken), error=error.message)
