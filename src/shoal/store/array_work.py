"""What was asked of all elements of an array and is not done with all of them yet.

It is done some elements at a time, each time in a transaction of its own. Until its row is gone, whoever
finds it goes on with it: the caller who asked, or repeats that, or the control plane after a crash.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from sqlalchemy import bindparam, delete, insert, select, update

from shoal.store.prepared import Session
from shoal.store.schema import array_work

_THIS = (array_work.c.array_id == bindparam("of")) & (array_work.c.verb == bindparam("doing"))
INSERT = insert(array_work)
GET = select(array_work.c.actor, array_work.c.last_number).where(_THIS)
ALL = select(array_work.c.array_id, array_work.c.verb).order_by(array_work.c.array_id, array_work.c.verb)
MOVE = update(array_work).where(_THIS).values(last_number=bindparam("to_last"))
DELETE = delete(array_work).where(_THIS)


class ArrayVerb(StrEnum):
    SUBMIT = "submit"
    """Elements are still to be recorded."""
    STOP = "stop"
    """Elements are still to be stopped."""


class UnderWay(NamedTuple):
    actor: str
    """Who asked, as JSON."""
    last_number: int
    """The job's number that it is done with up to; 0: with none."""


class ArrayWork:
    def __init__(self, session: Session) -> None:
        self._run = session.run

    def begin(self, array_id: str, verb: ArrayVerb, actor: str) -> None:
        """From the first element on, also where it was under way already."""
        self.end(array_id, verb)
        self._run(INSERT, {"array_id": array_id, "verb": verb, "actor": actor, "last_number": 0})

    def get(self, array_id: str, verb: ArrayVerb) -> UnderWay | None:
        """None: it is done, or was never asked for."""
        row = self._run(GET, {"of": array_id, "doing": verb}).fetchone()
        return None if row is None else UnderWay(*row)

    def all(self) -> list[tuple[str, ArrayVerb]]:
        return [(array_id, ArrayVerb(verb)) for array_id, verb in self._run(ALL)]

    def move(self, array_id: str, verb: ArrayVerb, last_number: int) -> None:
        """It is done with the elements up to that number."""
        self._run(MOVE, {"of": array_id, "doing": verb, "to_last": last_number})

    def end(self, array_id: str, verb: ArrayVerb) -> None:
        """May be repeated."""
        self._run(DELETE, {"of": array_id, "doing": verb})
