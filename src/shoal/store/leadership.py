"""Leadership among the control planes on one PostgreSQL: the leader's session holds the lock. Terms only
grow.

A leader takes its term in its first transaction and records it as an event. A `LeadershipWatch` belongs to a
waiting control plane. It reads who leads and announces its own address, and changes nothing else.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TypeVar

import msgspec
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, OperationalError

from shoal.store.database import drop, parse_url, unavailable_error
from shoal.store.postgres import (
    LOCK_NOT_AVAILABLE,
    OWNER_LOCK,
    SERVER_OPTIONS,
    TERM,
    create_postgres_engine,
    lock_holder,
)
from shoal.store.transaction import Tx

T = TypeVar("T")
LEADER = "control.leader"
PLANE = "plane:"
ANNOUNCED_S = 3600
"""An announcement older than this is not reported any more."""
FORGET_S = 7 * 86400
HAS_TABLES = "SELECT to_regclass('meta') IS NOT NULL"
ANNOUNCE = """
INSERT INTO meta (key, value) VALUES (%(key)s, extract(epoch FROM now())::bigint::text)
ON CONFLICT (key) DO UPDATE SET value = excluded.value
"""
FORGET = """
DELETE FROM meta WHERE key LIKE 'plane:%%' AND value::bigint < extract(epoch FROM now()) - %(age_s)s
"""
ANNOUNCED = """
SELECT substr(key, 7) FROM meta
WHERE key LIKE 'plane:%%' AND value::bigint >= extract(epoch FROM now()) - %(age_s)s ORDER BY key
"""


class LeaderRecord(msgspec.Struct, frozen=True):
    """The control plane that took the lead last."""

    term: int
    url: str
    by: str
    """Its process and machine, for people."""


def begin_term(tx: Tx, at: float, url: str) -> int:
    """Begin the next term and record an event. Only the holder of the lock may call this."""
    term = int(tx.meta.get(TERM) or 0) + 1
    lead = LeaderRecord(term=term, url=url, by=f"pid {os.getpid()} on {socket.gethostname()}")
    tx.meta.set(TERM, str(term))
    tx.meta.set(LEADER, msgspec.json.encode(lead).decode())
    tx.events.append("control.leads", at=at, actor="shoal", data=msgspec.to_builtins(lead))
    return term


class LeadershipWatch:
    """One connection, opened when needed and again after it was lost. Every call blocks.

    `StoreUnavailable`: the server does not answer; ask again later. For one thread at a time.
    """

    def __init__(self, url: str) -> None:
        self._engine = create_postgres_engine(parse_url(url), f"SET timezone = 'UTC'; {SERVER_OPTIONS}")
        self._connection: Connection | None = None

    def wait(self, timeout_s: float) -> bool:
        """Wait until the lead is free and return True, or return False after the timeout.

        The call holds nothing afterwards. Of several waiting control planes, the first one that opens the
        store leads.
        """
        return self._ask(lambda connection: _is_free(connection, timeout_s))

    def leader(self) -> LeaderRecord | None:
        """The present leader. None if there is none or it has not recorded itself."""
        return self._ask(_leader)

    def owner(self) -> str | None:
        """The name of the session that has the lock, or None."""
        return self._ask(lock_holder)

    def meta(self, key: str) -> str | None:
        """One fact of the installation. None also while there are no tables."""
        return self._ask(lambda connection: _meta(connection, key))

    def announce(self, url: str) -> tuple[str, ...]:
        """Announce where this control plane listens. Return all recent announcements, including this one."""
        return self._ask(lambda connection: _announce(connection, url))

    def close(self) -> None:
        if self._connection is not None:
            drop(self._connection)
        self._connection = None
        self._engine.dispose()

    def _ask(self, question: Callable[[Connection], T]) -> T:
        try:
            if self._connection is None:
                self._connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            return question(self._connection)
        except DBAPIError as error:
            if self._connection is not None:
                drop(self._connection)
            self._connection = None
            raise unavailable_error(error) from error


def _is_free(connection: Connection, timeout_s: float) -> bool:
    connection.exec_driver_sql(f"SET lock_timeout = {max(1, round(timeout_s * 1000))}")
    try:
        connection.exec_driver_sql(f"SELECT pg_advisory_lock({OWNER_LOCK})")
    except OperationalError as error:
        if getattr(error.orig, "sqlstate", None) != LOCK_NOT_AVAILABLE:
            raise
        return False
    connection.exec_driver_sql(f"SELECT pg_advisory_unlock({OWNER_LOCK})")
    return True


def _leader(connection: Connection) -> LeaderRecord | None:
    leader_text = _meta(connection, LEADER) if lock_holder(connection) is not None else None
    return None if leader_text is None else msgspec.json.decode(leader_text, type=LeaderRecord)


def _meta(connection: Connection, key: str) -> str | None:
    if not connection.exec_driver_sql(HAS_TABLES).scalar():
        return None
    value: str | None = connection.exec_driver_sql(
        "SELECT value FROM meta WHERE key = %(key)s", {"key": key}
    ).scalar()
    return value


def _announce(connection: Connection, url: str) -> tuple[str, ...]:
    if not connection.exec_driver_sql(HAS_TABLES).scalar():
        return (url,)
    connection.exec_driver_sql(FORGET, {"age_s": FORGET_S})
    connection.exec_driver_sql(ANNOUNCE, {"key": f"{PLANE}{url}"})
    return tuple(row[0] for row in connection.exec_driver_sql(ANNOUNCED, {"age_s": ANNOUNCED_S}))
