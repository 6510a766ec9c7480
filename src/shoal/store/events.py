"""The event log: entries are added at the end, without gaps, and never changed or taken out.

Triggers in the database refuse UPDATE and DELETE; the chain of keyed hashes shows what was done to it by
others than a control plane of this home.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Row,
    and_,
    bindparam,
    exists,
    func,
    insert,
    literal_column,
    or_,
    select,
)

from shoal.store.base import Event, EventFilter, Flaw, Head, Look
from shoal.store.chain import GENESIS, link
from shoal.store.codec import decode_data, encode
from shoal.store.prepared import Session
from shoal.store.schema import events, jobs

VERIFY_CHUNK = 1000
MAX_LOOKED = 2000
"""Entries that one look reads: some milliseconds, whatever the filter leaves out."""
SeeEntry = Callable[[int, str, str], None]
"""Takes an entry's number, kind and data as JSON."""
START = Head(0, GENESIS)
EVERYTHING = EventFilter()

COLUMNS: tuple[Column[Any], ...] = (
    events.c.seq,
    events.c.hash,
    events.c.at,
    events.c.kind,
    events.c.actor,
    events.c.project,
    events.c.job_id,
    events.c.attempt_id,
    events.c.node,
    events.c.data,
    events.c.request_id,
)
# Written out, not bound: SQLite uses a partial index only for a condition it can read.
IS_NOT_OURS: ColumnElement[bool] = literal_column("events.actor") != literal_column("'shoal'")
INDEXED_KINDS: dict[str, ColumnElement[bool]] = {
    "drill.": literal_column("substr(events.kind, 1, 6)") == literal_column("'drill.'"),
    "attempt.ended": literal_column("events.kind") == literal_column("'attempt.ended'"),
}
"""By prefix: few of many entries, which have an index of their own."""
INSERT = insert(events)
NEWEST = select(events.c.seq, events.c.hash).order_by(events.c.seq.desc()).limit(1)
LOWEST = select(func.min(events.c.seq))
ENTRY = select(events.c.seq, events.c.hash).where(events.c.seq == bindparam("at_seq"))
AFTER = (
    select(*COLUMNS).where(events.c.seq > bindparam("after")).order_by(events.c.seq).limit(bindparam("limit"))
)


class Events:
    def __init__(self, session: Session, key: bytes) -> None:
        self._session = session
        self._run = session.run
        self._key = key
        self._head: Head | None = None

    def append(
        self,
        kind: str,
        *,
        at: float,
        actor: str,
        project: str | None = None,
        job_id: str | None = None,
        attempt_id: str | None = None,
        node: str | None = None,
        data: dict[str, Any] | None = None,
        request_id: str | None = None,
    ) -> Event:
        """Add one entry after the newest. If the transaction is undone, its number is used again."""
        before = self.head()
        seq, at, body = before.seq + 1, float(at), encode(data or {})
        texts = (kind, actor, project, job_id, attempt_id, node, body, request_id)
        digest = link(self._key, before.hash, seq, at, *texts)
        row: dict[str, Any] = {
            "seq": seq,
            "hash": digest,
            "at": at,
            "kind": kind,
            "actor": actor,
            "project": project,
            "job_id": job_id,
            "attempt_id": attempt_id,
            "node": node,
            "request_id": request_id,
        }
        self._run(INSERT, row | {"data": body})
        self._head = Head(seq, digest)
        return Event(**row, data=data or {})

    def head(self) -> Head:
        """The newest entry; (0, 64 zeros) while there is none."""
        if self._head is None:
            found = self._run(NEWEST).fetchone()
            self._head = START if found is None else Head(found[0], found[1])
        return self._head

    def rewind(self, head: Head) -> None:
        """Forget what was appended after `head`: the writer calls this when it undoes a change."""
        self._head = head

    def look(self, after_seq: int, wanted: EventFilter, limit: int) -> Look:
        """Read on from that entry: at most `limit` matching entries, oldest first, of `MAX_LOOKED`."""
        narrow, others = _split(wanted)
        after = (events.c.seq > after_seq, *narrow)
        found = select(events.c.seq).where(*after).order_by(events.c.seq).limit(1).offset(MAX_LOOKED - 1)
        last = self._session.ask(found).scalar()
        until = last if last is not None else max(self.head().seq, after_seq)
        query = select(*COLUMNS).where(*after, events.c.seq <= until, *others)
        rows = self._session.ask(query.order_by(events.c.seq).limit(limit)).all()
        if len(rows) == limit:
            return Look([_event(row) for row in rows], rows[-1][0], is_done=False)
        return Look([_event(row) for row in rows], until, is_done=last is None)

    def look_back(self, before_seq: int, wanted: EventFilter, limit: int) -> Look:
        """Read backwards from that entry: at most `limit` matching entries, newest first, of `MAX_LOOKED`."""
        narrow, others = _split(wanted)
        before, newest_first = (events.c.seq < before_seq, *narrow), events.c.seq.desc()
        found = select(events.c.seq).where(*before).order_by(newest_first).limit(1).offset(MAX_LOOKED - 1)
        last = self._session.ask(found).scalar()
        query = select(*COLUMNS).where(*before, events.c.seq >= (last or 0), *others)
        rows = self._session.ask(query.order_by(newest_first).limit(limit)).all()
        return Look([_event(row) for row in rows], last or 0, is_done=last is None)

    def page(self, after_seq: int = 0, wanted: EventFilter = EVERYTHING, limit: int = 100) -> list[Event]:
        """The next `limit` matching entries after that one, oldest first."""
        query = select(*COLUMNS).where(events.c.seq > after_seq, *_conditions(wanted))
        return [_event(row) for row in self._session.ask(query.order_by(events.c.seq).limit(limit))]

    def latest(self, count: int, wanted: EventFilter = EVERYTHING, after_seq: int = 0) -> list[Event]:
        """The newest `count` matching entries after that one, oldest of them first."""
        query = select(*COLUMNS).where(events.c.seq > after_seq, *_conditions(wanted))
        rows = self._session.ask(query.order_by(events.c.seq.desc()).limit(count)).all()
        return [_event(row) for row in reversed(rows)]

    def verify(
        self, from_seq: int = 0, anchor: Head | None = None, see: SeeEntry | None = None
    ) -> Flaw | None:
        """Walk the log after `from_seq`, whose hash is trusted; return the first bad entry, or None.

        Without an anchor a missing tail cannot be seen, nor an earlier copy of the log that was put in its
        place. `see` is shown each entry that follows.
        """
        flaw = self.verify_anchor(anchor) if anchor is not None else None
        return self._verify_begin() or self._verify_chain(from_seq, see) or flaw

    def _verify_begin(self) -> Flaw | None:
        lowest = self._session.value(LOWEST, {})
        if lowest is not None and lowest < 1:
            return Flaw(lowest, "the entry was added: the log begins with entry 1")
        return None

    def _verify_chain(self, from_seq: int, see: SeeEntry | None) -> Flaw | None:
        before = START
        if from_seq > 0:
            found = self._run(ENTRY, {"at_seq": from_seq}).fetchone()
            if found is None:
                return Flaw(from_seq, "the entry is missing")
            before = Head(found[0], found[1])
        for row in self._walk(from_seq):
            flaw = _flaw(self._key, before, row)
            if flaw is not None:
                return flaw
            before = Head(row[0], row[1])
            if see is not None:
                see(row[0], row[3], row[9])
        return None

    def verify_anchor(self, anchor: Head) -> Flaw | None:
        """Whether the log has the entry that the anchor remembers. Reads that entry alone."""
        if anchor.seq == 0:
            return None
        found = self._run(ENTRY, {"at_seq": anchor.seq}).fetchone()
        if found is not None and found[1] == anchor.hash:
            return None
        if found is not None:
            return Flaw(anchor.seq, "the entry is not the one that the anchor remembers")
        newest = self._run(NEWEST).fetchone()
        end = newest[0] if newest is not None else 0
        if end < anchor.seq:
            return Flaw(end + 1, f"the log ends before it; the anchor remembers entry {anchor.seq}")
        return Flaw(anchor.seq, "the entry is missing")

    def _walk(self, after: int) -> Iterator[tuple[Any, ...]]:
        while rows := self._run(AFTER, {"after": after, "limit": VERIFY_CHUNK}).fetchall():
            yield from rows
            after = rows[-1][0]


def _flaw(key: bytes, before: Head, row: tuple[Any, ...]) -> Flaw | None:
    seq, digest, at, *texts = row
    if seq != before.seq + 1:
        return Flaw(before.seq + 1, f"the entry is missing; the next one is {seq}")
    if link(key, before.hash, seq, at, *texts) != digest:
        told = "the entry does not follow from the one before it: one of them was changed, or it was added"
        return Flaw(seq, f"{told} without the home's key")
    return None


def _conditions(wanted: EventFilter) -> list[ColumnElement[bool]]:
    narrow, others = _split(wanted)
    return [*narrow, *others]


def _split(wanted: EventFilter) -> tuple[list[ColumnElement[bool]], list[ColumnElement[bool]]]:
    """The conditions of the filter: the one that an index serves, if any does, and all others.

    The others are written so that no index looks good for them: else SQLite may walk a longer one.
    """
    narrow, others = list[ColumnElement[bool]](), list[ColumnElement[bool]]()

    def add(condition: ColumnElement[bool], hidden: ColumnElement[bool]) -> None:
        if narrow:
            others.append(hidden)
        else:
            narrow.append(condition)

    if wanted.job_id is not None:
        add(events.c.job_id == wanted.job_id, func.coalesce(events.c.job_id, "") == wanted.job_id)
    if wanted.kinds_prefix in INDEXED_KINDS:
        add(INDEXED_KINDS[wanted.kinds_prefix], INDEXED_KINDS[wanted.kinds_prefix])
    elif wanted.kinds_prefix is not None:
        others.append(func.substr(events.c.kind, 1, len(wanted.kinds_prefix)) == wanted.kinds_prefix)
    if wanted.node is not None:
        add(events.c.node == wanted.node, func.coalesce(events.c.node, "") == wanted.node)
    if wanted.projects is not None:
        hidden = func.coalesce(events.c.project, "").in_(wanted.projects)
        if len(wanted.projects) == 1:
            add(events.c.project == wanted.projects[0], hidden)
        else:
            others.append(hidden)
    if wanted.without_ours:
        add(IS_NOT_OURS, IS_NOT_OURS)
    if wanted.service is not None:
        others.append(_is_of_service(wanted.service))
    return narrow, others


def _is_of_service(name: str) -> ColumnElement[bool]:
    """By what the entry says; of an entry about a job the job is asked: a replica's name their service."""
    # Quotes within a text are escaped in JSON: only a field of that name and value looks like this.
    field = f'"service":{encode(name)}'
    says = and_(events.c.job_id.is_(None), events.c.data.contains(field, autoescape=True))
    replica = exists().where(
        jobs.c.job_id == events.c.job_id, jobs.c.name == name, jobs.c.body.contains(field, autoescape=True)
    )
    return and_(events.c.project.is_not(None), or_(says, replica))


def _event(row: Row[Any]) -> Event:
    seq, digest, at, kind, actor, project, job_id, attempt_id, node, data, request_id = tuple(row)
    return Event(
        seq=seq,
        hash=digest,
        at=at,
        kind=kind,
        actor=actor,
        project=project,
        job_id=job_id,
        attempt_id=attempt_id,
        node=node,
        data=decode_data(data),
        request_id=request_id,
    )
