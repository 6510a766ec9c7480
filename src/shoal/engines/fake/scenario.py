"""What a test scripts: a virtual clock, the faults between control plane and cluster, and the life of each
task.

A script decides how long each stage of a task on a fake node takes and how it ends. It is a function of the
task spec alone, never of the order of calls or of earlier questions, so a seed replays exactly.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from enum import StrEnum

import msgspec

from shoal.wire import EndKind, RuleAction, TaskRanks, TaskSpec


class VirtualClock:
    """A `Clock` for simulation: the date can be made to jump, the monotonic time only advances."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._monotonic = 0.0
        self._ahead = now

    def now(self) -> float:
        return self._ahead + self._monotonic

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        if seconds < 0:
            raise ValueError(f"time cannot pass backwards: {seconds}")
        self._monotonic += seconds

    def advance_to(self, monotonic: float) -> None:
        """Let time pass until this monotonic reading; one already passed is no move."""
        self._monotonic = max(self._monotonic, monotonic)

    def jump(self, seconds: float) -> None:
        """Set the date forward or back without letting time pass."""
        self._ahead += seconds


class Verb(StrEnum):
    SUBMIT = "submit"
    CANCEL = "cancel"
    LIST_OWNED = "list_owned"
    FORGET = "forget"
    NODES = "nodes"
    READ_LOG = "read_log"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to one call. The default is no fault."""

    is_lost_before: bool = False
    """`EngineUnreachable`, and the call had no effect."""
    is_lost_after: bool = False
    """`EngineUnreachable`, though the call had its whole effect: the reply was lost."""
    delay_s: float = 0.0
    """A task spec or a stop reaches its node this much later."""
    is_stillborn: bool = False
    """The task specs reach their nodes, but no supervisor starts from them unless they are sent again."""
    copies: int = 1
    """The number of copies of each observation in the list."""
    is_stale: bool = False
    """Tasks that were listed before are listed with their old observation."""


NO_FAULT = Fault()

Faults = Callable[[Verb, str | None], Fault]
"""Called once for each call to the engine, with the attempt's id if there is one."""


def no_faults(verb: Verb, attempt_id: str | None) -> Fault:
    return NO_FAULT


def seeded_faults(seed: int, *, chance: float = 0.1, max_delay_s: float = 5.0) -> Faults:
    """Return faults: each call fails in one of the ways above with `chance`, by `seed` and the call's
    number.
    """
    dice = random.Random(f"faults/{seed}")  # noqa: S311 - replay, not secrecy

    def faults(verb: Verb, attempt_id: str | None) -> Fault:
        # Always the same number of draws, so that the fate of one call does not shift the others'.
        roll, which, delay_s = dice.random(), dice.randrange(6), dice.uniform(0, max_delay_s)
        if roll >= chance:
            return NO_FAULT
        return (
            Fault(is_lost_before=True),
            Fault(is_lost_after=True),
            Fault(delay_s=delay_s),
            Fault(copies=2),
            Fault(is_stale=True),
            Fault(is_stillborn=True),
        )[which]

    return faults


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """The life of one task. Stages follow each other: claimed, prepared, run. A stop may cut it short."""

    claim_s: float = 0.0
    """From the arrival of the task spec until a supervisor is observed alive."""
    prepare_s: float = 0.0
    """From then until the ranks have started."""
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


Script = Callable[[TaskSpec], Act]


def always(act: Act) -> Script:
    """Return a script by which every task does the same."""
    return lambda _: act


def by_run(acts: Mapping[str, Act], otherwise: Act | None = None) -> Script:
    """Return a script by the task's `run` line; without `otherwise`, an unknown line is a `KeyError`."""

    def script(task_spec: TaskSpec) -> Act:
        return (
            acts[task_spec.program.run] if otherwise is None else acts.get(task_spec.program.run, otherwise)
        )

    return script


def seeded(seed: int, *, mean_run_s: float = 60.0, failing: float = 0.2, endless: float = 0.05) -> Script:
    """Return a script with lives drawn from `seed`, the attempt's id and the node.

    Run times are exponential. `failing` is the chance that a task ends badly, `endless` the chance that it
    runs until it is stopped.
    """

    def script(task_spec: TaskSpec) -> Act:
        identity = task_spec.identity
        which = f"{identity.node}/{identity.replacement}" if identity.replacement else identity.node
        dice = random.Random(f"{seed}/{identity.attempt_id}/{which}")  # noqa: S311 - replay, not secrecy
        claim_s, prepare_s, stop_s = dice.uniform(0, 2), dice.uniform(0, 5), dice.uniform(0, 40)
        run_s = None if dice.random() < endless else dice.expovariate(1 / mean_run_s)
        end = _failure(dice, task_spec.ranks) if dice.random() < failing else Act()
        return msgspec.structs.replace(end, claim_s=claim_s, prepare_s=prepare_s, run_s=run_s, stop_s=stop_s)

    return script


def _failure(dice: random.Random, ranks: TaskRanks) -> Act:
    rank = ranks.node_rank * ranks.ranks_per_node + dice.randrange(ranks.ranks_per_node)
    kind = dice.choice((EndKind.EXITED, EndKind.SIGNALED, EndKind.OUT_OF_MEMORY, EndKind.LOST))
    if kind is EndKind.EXITED:
        code = dice.randint(1, 255)
        return Act(kind=kind, exit_code=code, rank=rank, message=f"rank {rank} exited with {code}")
    if kind is EndKind.SIGNALED:
        return Act(kind=kind, exit_code=None, signal=11, rank=rank, message=f"rank {rank} got signal 11")
    return Act(
        kind=kind, exit_code=None, rank=rank if kind is EndKind.OUT_OF_MEMORY else None, message=str(kind)
    )
