"""What a share of an attempt does on a fake node: how long each stage takes and how it ends.

A script is a function of the order alone, never of call order or of what was asked before, so that a
seed replays exactly.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import msgspec

from shoal.wire import EndKind, Order, RuleAction


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """One share's life. Stages follow each other: claimed, prepared, run; a stop may cut it short."""

    claim_s: float = 0.0
    """From the order's arrival until a supervisor is seen alive."""
    prepare_s: float = 0.0
    """From then until the ranks are started."""
    run_s: float | None = 1.0
    """From then until the end; None: until it is stopped."""
    stop_s: float = 0.0
    """From a stop until the end; never longer than the stop's grace."""
    kind: EndKind = EndKind.SUCCEEDED
    exit_code: int | None = 0
    signal: int | None = None
    rank: int | None = None
    message: str = ""
    rules_hit: tuple[RuleAction, ...] = ()
    lines: tuple[str, ...] = ()
    """What local rank 0 prints when it starts."""


Script = Callable[[Order], Act]


def always(act: Act) -> Script:
    """Every share does the same."""
    return lambda _: act


def by_run(acts: Mapping[str, Act], otherwise: Act | None = None) -> Script:
    """Look the share's `run` line up; without `otherwise` an unknown line is a `KeyError`."""

    def script(order: Order) -> Act:
        return acts[order.run] if otherwise is None else acts.get(order.run, otherwise)

    return script


def seeded(seed: int, *, mean_run_s: float = 60.0, failing: float = 0.2, endless: float = 0.05) -> Script:
    """Lives drawn from `seed`, the attempt's id and the node: exponential run times, some failures.

    `failing` and `endless` are the chances that a share ends badly, and that it runs until stopped.
    """

    def script(order: Order) -> Act:
        which = f"{order.node}/{order.incarnation}" if order.incarnation else order.node
        dice = random.Random(f"{seed}/{order.attempt_id}/{which}")  # noqa: S311 - replay, not secrecy
        claim_s, prepare_s, stop_s = dice.uniform(0, 2), dice.uniform(0, 5), dice.uniform(0, 40)
        run_s = None if dice.random() < endless else dice.expovariate(1 / mean_run_s)
        end = _failure(dice, order) if dice.random() < failing else Act()
        return msgspec.structs.replace(end, claim_s=claim_s, prepare_s=prepare_s, run_s=run_s, stop_s=stop_s)

    return script


def _failure(dice: random.Random, order: Order) -> Act:
    rank = order.node_rank * order.ranks_per_node + dice.randrange(order.ranks_per_node)
    kind = dice.choice((EndKind.EXITED, EndKind.SIGNALED, EndKind.OUT_OF_MEMORY, EndKind.LOST))
    if kind is EndKind.EXITED:
        code = dice.randint(1, 255)
        return Act(kind=kind, exit_code=code, rank=rank, message=f"rank {rank} exited with {code}")
    if kind is EndKind.SIGNALED:
        return Act(kind=kind, exit_code=None, signal=11, rank=rank, message=f"rank {rank} got signal 11")
    return Act(
        kind=kind, exit_code=None, rank=rank if kind is EndKind.OUT_OF_MEMORY else None, message=str(kind)
    )
