"""What supervisors on other machines ask for before they can renew: their order; what keepers hand in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import anyio.to_thread
import msgspec

from shoal.control.core import Core
from shoal.control.launch import Starting, load, submission_of
from shoal.engines.desk import Desk, SupportsDesk
from shoal.errors import EngineUnreachable, NotFound, StateError
from shoal.model.attempt import AttemptState
from shoal.store import Tx
from shoal.wire import KEEPER_WAIT_S, Assignment, Credentials, Dispatch, DispatchAnswer, Fetch, Order

T = TypeVar("T")


async def fetch(core: Core, asked: Fetch) -> Assignment:
    """The order of this share for the process that asks, if the share may begin now. The same process may ask
    again; `StateError` for any other, and for a share whose time is over. One that ended while its order was
    taken stays so at the desk, and nobody begins it.
    """
    engine, asked_at = _engine(core), core.clock.monotonic()
    starting = await core.store.read(lambda tx: _current(tx, asked))
    submission = submission_of(core, starting)
    laid = engine.desk.find(asked.attempt_id).get(asked.node)
    # Before anybody has it: who is told "not now" may never ask again, and nobody else could get it.
    order = await engine.as_given(laid.order) if laid is not None else None
    if core.clock.monotonic() - asked_at >= KEEPER_WAIT_S:
        raise EngineUnreachable(f"{asked.node} does not wait any more for the order of {asked.attempt_id}")
    share = await _led(core, partial(engine.desk.take, asked))
    if order is None or laid is None or share.order != laid.order:  # laid down anew meanwhile
        order = await engine.as_given(share.order)
    own = asked.attempt_id, asked.node, share.order.incarnation
    with core.leases.speaking(*own):
        # An end that was recorded since the question is of a share that nobody had; nobody is to have it.
        await core.store.read(lambda tx: _refuse_ended(tx, share.order))
        if core.leases.is_overdue(*own):
            await core.store.write(lambda tx: _refuse_ended(tx, share.order))
        core.leases.heard(*own)
    return Assignment(
        order=msgspec.structs.replace(order, control_urls=core.urls_to_tell),
        credentials=_with_porch(core, share.order, submission.credentials[asked.node]),
        has_archive=share.order.archive_digest is not None,
    )


def _with_porch(core: Core, order: Order, credentials: Credentials) -> Credentials:
    """The node where the server of a replica listens has a porch before it."""
    if core.porches is None or order.probe is None or order.node_rank > 0:
        return credentials
    return msgspec.structs.replace(credentials, porch=core.porches.before(order.attempt_id))


async def archive_for(core: Core, asked: Fetch) -> str:
    """Where the snapshot lies that goes with this order; for who has the order alone."""
    share = _desk(core).find(asked.attempt_id).get(asked.node)
    if share is None or share.taken is None or share.taken.process != asked.process:
        await _lead(core)
        raise StateError("the snapshot is for the process that has the order")
    return share.files.archive


async def hear(core: Core, told: Dispatch, piece: bytes) -> DispatchAnswer:
    """Keep what the keeper of a share says. The loops look at once when a share began or ended."""
    answer = await _led(core, partial(_desk(core).hear, told, piece))
    return msgspec.structs.replace(answer, control_urls=core.urls_to_tell)


async def _led(core: Core, work: Callable[[], T]) -> T:
    """What the desk says, if this control plane may say it: a keeper stops healthy ranks for a refusal, and
    one that was deposed may refuse for what it does not know.
    """
    try:
        return await anyio.to_thread.run_sync(work)
    finally:
        await _lead(core)


async def _lead(core: Core) -> None:
    """`Deposed` unless this control plane still leads: what it heard is on disk, and its successor hears it
    again from who was not answered.
    """
    if core.term:
        await core.store.read(lambda _: None)


def _desk(core: Core) -> Desk:
    return _engine(core).desk


def _engine(core: Core) -> SupportsDesk:
    if not isinstance(core.engine, SupportsDesk):
        raise NotFound(
            f"no order waits here: the engine is `{core.engine.name}`, whose nodes are this machine"
        )
    return core.engine


def _refuse_ended(tx: Tx, order: Order) -> None:
    """One that is to end is given all the same: who has it hears of that, and says when it is over."""
    attempt = tx.attempts.get(order.attempt_id)
    if attempt is None or attempt.state is AttemptState.ENDED or order.node not in attempt.nodes_left:
        raise StateError(f"{order.attempt_id} does not begin on {order.node}: it has ended")
    if attempt.incarnation(order.node) != order.incarnation:
        raise StateError(f"the share of {order.attempt_id} on {order.node} was replaced")


def _current(tx: Tx, asked: Fetch) -> Starting:
    """The attempt, if the control plane still wants this share of it to begin."""
    found = load(tx, [asked.attempt_id])
    attempt = found[0].attempt if found else None
    if attempt is None or asked.node not in attempt.nodes_left:
        raise StateError(f"{asked.attempt_id} does not begin on {asked.node}: it has ended, or is to end")
    now = attempt.incarnation(asked.node)
    if asked.after is not None and now <= asked.after:
        raise NotFound(f"nothing follows incarnation {asked.after} of {asked.attempt_id} on {asked.node} yet")
    if asked.after is None and now != asked.incarnation:
        raise StateError(
            f"the share of {asked.attempt_id} on {asked.node} is incarnation {now}, not {asked.incarnation}"
        )
    return found[0]
