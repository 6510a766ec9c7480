"""`python -m tests.support.paper_keeper SPOOL ATTEMPT RUN [WORD...]`: a real keeper, whose desk is its own
process. The words are the confinement. What is told of the end of the share is written to standard output.
"""

from __future__ import annotations

import sys

import msgspec

from shoal.runtime import kernel
from shoal.runtime.desk import DeskClient
from shoal.runtime.keeper import Keeper
from shoal.wire import Assignment, Credentials, Dispatch, DispatchAnswer, Fetch, Order, Summons
from tests.support.shares import an_order


class Desk(DeskClient):
    def __init__(self, order: Order) -> None:
        self._order = order

    def learn(self, urls: tuple[str, ...]) -> None:
        """Nobody else is there."""

    def fetch(self, ticket: str, asked: Fetch) -> Assignment:
        credentials = Credentials(proof_key="key")
        return Assignment(order=self._order, credentials=credentials, has_archive=False)

    def tell(self, key: str, told: Dispatch, piece: bytes) -> DispatchAnswer:
        if told.outcome is not None:
            sys.stdout.buffer.write(msgspec.json.encode(told.outcome) + b"\n")
            sys.stdout.buffer.flush()
        return DispatchAnswer(size=told.offset + len(piece), is_recorded=told.outcome is not None)


def main(spool: str, attempt_id: str, run: str, *words: str) -> int:
    order = an_order(attempt_id=attempt_id, run=run, confinement=words)
    summons = Summons(attempt_id=attempt_id, urls=("https://a:1",), ca="ca", ticket="t", spool=spool)
    kernel.become_subreaper()
    return Keeper(summons, order.node, Desk(order)).run()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
