"""The event log: entries are added at the end, without gaps, and never changed or removed.

Triggers in the database refuse UPDATE and DELETE. The chain of keyed hashes shows changes that any program
but a control plane of this home made.
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

from shoal.store.base import ChainFlaw, Event, EventFilter, EventScan, LogHead
from shoal.store.hash_chain import GENESIS, chain_hash
from shoal.store.schema import events, jobs
from shoal.store.session import Session, decode_data, encode

VERIFY_CHUNK = 1000
MAX_SCANNED = 2000
"""Entries that one scan reads: some milliseconds, whatever the filter leaves out."""
OnEntry = Callable[[int, str, str], None]
"""Takes an entry's number, kind and data as JSON."""
START = LogHead(0, GENESIS)
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
# Written out, not bound: SQLite uses a partial index only for a condition that it can read.
IS_NOT_OURS: ColumnElement[bool] = literal_column("events.actor") != literal_column("'shoal'")
INDEXED_KINDS: dict[str, ColumnElement[bool]] = {
    "drill.": literal_column("substr(events.kind, 1, 6)") == literal_column("'drill.'"),
    "attempt.ended": literal_column("events.kind") == literal_column("'attempt.ended'"),
}
"""By prefix of the kind. These kinds are few among many entries and have an index of their own."""
INSERT = insert(events)
NEWEST = select(events.c.seq, events.c.hash).order_by(events.c.seq.desc()).limit(1)
LOWEST = select(func.min(events.c.seq))
ENTRY = select(events.c.seq, events.c.hash).where(events.c.seq == bindparam("at_seq"))
AFTER = (
    select(*COLUMNS).where(events.c.seq > bindparam("after")).order_by(events.c.seq).limit(bindparam("limit"))
)


class EventLog:
    def __init__(self, session: Session, key: bytes) -> None:
        self._session = session
        self._run = session.run
        self._key = key
        self._head: LogHead | None = None

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
        """Add one entry after the newest. If the transaction is undone, the entry's number is used again."""
        before = self.head()
        seq, at, body = before.seq + 1, float(at), encode(data or {})
        texts = (kind, actor, project, job_id, attempt_id, node, body, request_id)
        digest = chain_hash(self._key, before.hash, seq, at, *texts)
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
        self._head = LogHead(seq, digest)
        return Event(**row, data=data or {})

    def head(self) -> LogHead:
        """The newest entry; (0, 64 zeros) if the log is empty."""
        if self._head is None:
            row = self._run(NEWEST).fetchone()
            self._head = START if row is None else LogHead(row[0], row[1])
        return self._head

    def rewind(self, head: LogHead) -> None:
        """Forget what was appended after `head`. The writer calls this when it undoes a change."""
        self._head = head

    def scan(self, after_seq: int, wanted: EventFilter, limit: int) -> EventScan:
        """Read forward from that entry: at most `limit` matching entries, oldest first, of `MAX_SCANNED`."""
        narrow, others = _split(wanted)
        after = (events.c.seq > after_seq, *narrow)
        last_scanned = (
            select(events.c.seq).where(*after).order_by(events.c.seq).limit(1).offset(MAX_SCANNED - 1)
        )
        last = self._session.query(last_scanned).scalar()
        until = last if last is not None else max(self.head().seq, after_seq)
        query = select(*COLUMNS).where(*after, events.c.seq <= until, *others)
        rows = self._session.query(query.order_by(events.c.seq).limit(limit)).all()
        if len(rows) == limit:
            return EventScan([_event(row) for row in rows], rows[-1][0], is_done=False)
        return EventScan([_event(row) for row in rows], until, is_done=last is None)

    def scan_back(self, before_seq: int, wanted: EventFilter, limit: int) -> EventScan:
        """Read back from that entry: at most `limit` matching entries, newest first, of `MAX_SCANNED`."""
        narrow, others = _split(wanted)
        before, newest_first = (events.c.seq < before_seq, *narrow), events.c.seq.desc()
        last_scanned = (
            select(events.c.seq).where(*before).order_by(newest_first).limit(1).offset(MAX_SCANNED - 1)
        )
        last = self._session.query(last_scanned).scalar()
        query = select(*COLUMNS).where(*before, events.c.seq >= (last or 0), *others)
        rows = self._session.query(query.order_by(newest_first).limit(limit)).all()
        return EventScan([_event(row) for row in rows], last or 0, is_done=last is None)

    def page(self, after_seq: int = 0, wanted: EventFilter = EVERYTHING, limit: int = 100) -> list[Event]:
        """The next `limit` matching entries after that entry, oldest first."""
        query = select(*COLUMNS).where(events.c.seq > after_seq, *_conditions(wanted))
        return [_event(row) for row in self._session.query(query.order_by(events.c.seq).limit(limit))]

    def latest(self, count: int, wanted: EventFilter = EVERYTHING, after_seq: int = 0) -> list[Event]:
        """The newest `count` matching entries after that entry, the oldest of them first."""
        query = select(*COLUMNS).where(events.c.seq > after_seq, *_conditions(wanted))
        rows = self._session.query(query.order_by(events.c.seq.desc()).limit(count)).all()
        return [_event(row) for row in reversed(rows)]

    def verify(
        self, from_seq: int = 0, anchor: LogHead | None = None, on_entry: OnEntry | None = None
    ) -> ChainFlaw | None:
        """Walk the log after `from_seq`, whose hash is trusted. Return the first bad entry, or None.

        Without an anchor this cannot detect a missing tail, or an earlier copy of the log in its place. `see`
        is called with each following entry.
        """
        flaw = self.verify_anchor(anchor) if anchor is not None else None
        return self._verify_begin() or self._verify_chain(from_seq, on_entry) or flaw

    def _verify_begin(self) -> ChainFlaw | None:
        lowest = self._session.value(LOWEST, {})
        if lowest is not None and lowest < 1:
            return ChainFlaw(lowest, "the entry was added: the log begins with entry 1")
        return None

    def _verify_chain(self, from_seq: int, on_entry: OnEntry | None) -> ChainFlaw | None:
        before = START
        if from_seq > 0:
            first_row = self._run(ENTRY, {"at_seq": from_seq}).fetchone()
            if first_row is None:
                return ChainFlaw(from_seq, "the entry is missing")
            before = LogHead(first_row[0], first_row[1])
        for row in self._walk(from_seq):
            flaw = _flaw(self._key, before, row)
            if flaw is not None:
                return flaw
            before = LogHead(row[0], row[1])
            if on_entry is not None:
                on_entry(row[0], row[3], row[9])
        return None

    def verify_anchor(self, anchor: LogHead) -> ChainFlaw | None:
        """Check that the log has the entry that the anchor remembers. Reads only that entry."""
        if anchor.seq == 0:
            return None
        row = self._run(ENTRY, {"at_seq": anchor.seq}).fetchone()
        if row is not None and row[1] == anchor.hash:
            return None
        if row is not None:
            return ChainFlaw(anchor.seq, "the entry is not the one that the anchor remembers")
        newest = self._run(NEWEST).fetchone()
        end = newest[0] if newest is not None else 0
        if end < anchor.seq:
            return ChainFlaw(end + 1, f"the log ends before it; the anchor remembers entry {anchor.seq}")
        return ChainFlaw(anchor.seq, "the entry is missing")

    def _walk(self, after: int) -> Iterator[tuple[Any, ...]]:
        while rows := self._run(AFTER, {"after": after, "limit": VERIFY_CHUNK}).fetchall():
            yield from rows
            after = rows[-1][0]


def _flaw(key: bytes, before: LogHead, row: tuple[Any, ...]) -> ChainFlaw | None:
    seq, digest, at, *texts = row
    if seq != before.seq + 1:
        return ChainFlaw(before.seq + 1, f"the entry is missing; the next one is {seq}")
    if chain_hash(key, before.hash, seq, at, *texts) != digest:
        message = "the entry does not follow from the one before it: one of them was changed, or it was added"
        return ChainFlaw(seq, f"{message} without the home's key")
    return None


def _conditions(wanted: EventFilter) -> list[ColumnElement[bool]]:
    narrow, others = _split(wanted)
    return [*narrow, *others]


def _split(wanted: EventFilter) -> tuple[list[ColumnElement[bool]], list[ColumnElement[bool]]]:
    """Split the filter's conditions: the one that an index serves, if there is one, and all others.

    The others are written so that no index looks useful for them. Otherwise SQLite may walk a longer one.
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
    """Match by the entry's own data. For an entry about a job, match by the job: a replica's name is its
    service's.
    """
    # JSON escapes quotes within a text, so only a field of that name and value can match.
    field = f'"service":{encode(name)}'
    condition = and_(events.c.job_id.is_(None), events.c.data.contains(field, autoescape=True))
    replica = exists().where(
        jobs.c.job_id == events.c.job_id, jobs.c.name == name, jobs.c.body.contains(field, autoescape=True)
    )
    return and_(events.c.project.is_not(None), or_(condition, replica))


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
