"""Who leads of the control planes on one PostgreSQL: whose session has the lock, by terms that only grow.

A term is taken in the first transaction of its leader and recorded as an event. `Standby` is the seat of one
that waits; it reads who leads and tells where it is itself, and changes nothing else.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TypeVar

import msgspec
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, OperationalError

from shoal.store.database import drop, unavailable
from shoal.store.postgres import (
    LOCK_NOT_AVAILABLE,
    OWNER_LOCK,
    SERVER_OPTIONS,
    TERM,
    connections,
    owner_of,
)
from shoal.store.transaction import Tx
from shoal.store.urls import parse_url

T = TypeVar("T")
LEADER = "control.leader"
PLANE = "plane:"
KNOWN_S = 3600
"""A control plane that told of itself longer ago is not named to anybody."""
FORGET_S = 7 * 86400
HAS_TABLES = "SELECT to_regclass('meta') IS NOT NULL"
TELL = """
INSERT INTO meta (key, value) VALUES (%(key)s, extract(epoch FROM now())::bigint::text)
ON CONFLICT (key) DO UPDATE SET value = excluded.value
"""
FORGET = """
DELETE FROM meta WHERE key LIKE 'plane:%%' AND value::bigint < extract(epoch FROM now()) - %(age_s)s
"""
KNOWN = """
SELECT substr(key, 7) FROM meta
WHERE key LIKE 'plane:%%' AND value::bigint >= extract(epoch FROM now()) - %(age_s)s ORDER BY key
"""


class Lead(msgspec.Struct, frozen=True):
    """Who took it last."""

    term: int
    url: str
    by: str
    """The process and its machine, for people."""


def take_lead(tx: Tx, at: float, url: str) -> int:
    """Begin the next term, with an event that says so. By whoever holds the lock alone."""
    term = int(tx.meta.get(TERM) or 0) + 1
    lead = Lead(term=term, url=url, by=f"pid {os.getpid()} on {socket.gethostname()}")
    tx.meta.set(TERM, str(term))
    tx.meta.set(LEADER, msgspec.json.encode(lead).decode())
    tx.events.append("control.leads", at=at, actor="shoal", data=msgspec.to_builtins(lead))
    return term


class Standby:
    """One connection, opened when it is needed and again after it was lost. Every call blocks.

    `StoreUnavailable`: the server does not answer; ask again later. For one thread at a time.
    """

    def __init__(self, url: str) -> None:
        self._engine = connections(parse_url(url), f"SET timezone = 'UTC'; {SERVER_OPTIONS}")
        self._connection: Connection | None = None

    def wait(self, timeout_s: float) -> bool:
        """Whether the lead is free, as soon as it is; False when the time is over first.

        Nothing is held afterwards: of several that wait, whoever opens the store first leads.
        """
        return self._ask(lambda connection: _is_free(connection, timeout_s))

    def leader(self) -> Lead | None:
        """Who leads now; None if nobody does, or it has not said so yet."""
        return self._ask(_leader)

    def owner(self) -> str | None:
        """Which session has the lock, by its name; None if nobody has."""
        return self._ask(owner_of)

    def meta(self, key: str) -> str | None:
        """One fact of the installation; None also while there are no tables."""
        return self._ask(lambda connection: _meta(connection, key))

    def meet(self, own_url: str) -> tuple[str, ...]:
        """Tell the others where this control plane listens; returns all that did so lately, it included."""
        return self._ask(lambda connection: _meet(connection, own_url))

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
            raise unavailable(error) from error


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


def _leader(connection: Connection) -> Lead | None:
    told = _meta(connection, LEADER) if owner_of(connection) is not None else None
    return None if told is None else msgspec.json.decode(told, type=Lead)


def _meta(connection: Connection, key: str) -> str | None:
    if not connection.exec_driver_sql(HAS_TABLES).scalar():
        return None
    value: str | None = connection.exec_driver_sql(
        "SELECT value FROM meta WHERE key = %(key)s", {"key": key}
    ).scalar()
    return value


def _meet(connection: Connection, own_url: str) -> tuple[str, ...]:
    if not connection.exec_driver_sql(HAS_TABLES).scalar():
        return (own_url,)
    connection.exec_driver_sql(FORGET, {"age_s": FORGET_S})
    connection.exec_driver_sql(TELL, {"key": f"{PLANE}{own_url}"})
    return tuple(row[0] for row in connection.exec_driver_sql(KNOWN, {"age_s": KNOWN_S}))
