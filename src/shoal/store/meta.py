"""Small facts about this installation, as text by name; and counters that only grow."""

from __future__ import annotations

from sqlalchemy import Connection, bindparam, insert, select, update

from shoal.store.schema import meta

INSERT = insert(meta)
GET = select(meta.c.value).where(meta.c.key == bindparam("named"))
SET = update(meta).where(meta.c.key == bindparam("named")).values(value=bindparam("to_value"))


class Meta:
    def __init__(self, connection: Connection) -> None:
        self._run = connection.execute

    def get(self, key: str) -> str | None:
        return self._run(GET, {"named": key}).scalar()

    def set(self, key: str, value: str) -> None:
        """Add, or replace."""
        if self._run(SET, {"named": key, "to_value": value}).rowcount == 0:
            self._run(INSERT, {"key": key, "value": value})

    def take(self, key: str, first: int) -> int:
        """The next value of a counter that begins at `first` and never gives one twice."""
        value = int(self.get(key) or first)
        self.set(key, str(value + 1))
        return value
