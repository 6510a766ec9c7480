"""Which policy this control plane plans by, in the log: without it no decision could be made again."""

from __future__ import annotations

import msgspec

from shoal.control.actor import SHOAL
from shoal.control.core import Core
from shoal.control.record import note
from shoal.store import Tx

KEY = "policy"


async def declare_policy(core: Core) -> None:
    """Note the policy where it is another than before. May be repeated."""
    policy = msgspec.to_builtins(core.planner.policy)
    text = msgspec.json.encode(policy, order="sorted").decode()

    def change(tx: Tx) -> None:
        tx.meta.set(KEY, text)
        note(tx, "policy.set", core.clock.now(), SHOAL, data=policy)

    if await core.store.read(lambda tx: tx.meta.get(KEY)) != text:
        await core.store.write(change)
