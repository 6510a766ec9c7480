"""Idempotency: a mutation repeated with the same key gives the first answer and changes nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

import msgspec

from shoal.control.actor import Actor
from shoal.store import Tx

T = TypeVar("T")


def fingerprint(*parts: object) -> str:
    """What a request said, so that one key cannot be used for two different requests."""
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def once(
    tx: Tx,
    actor: Actor,
    key: str | None,
    asked: str,
    now: float,
    answer_type: type[T],
    change: Callable[[], T],
) -> tuple[T, bool]:
    """The answer, and whether it is a remembered one. The key, the change and the answer commit together.

    Raises, with nothing changed, where the actor has lost the right to it since the request was let in.
    """
    if actor.rights is not None:
        actor.rights.check(tx, now)
    if key is None:
        return change(), False
    remembered = tx.keys.recall(str(actor), key, asked)
    if remembered is not None:
        return msgspec.json.decode(remembered, type=answer_type), True
    answer = change()
    tx.keys.remember(str(actor), key, asked, msgspec.json.encode(answer), now)
    return answer, False
