"""Flags that `whatif` and `plan` share, and what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from shoal.errors import SpecError

if TYPE_CHECKING:
    from shoal.sim.checkpoints import Checkpoints
    from shoal.sim.failures import Failures

Trace = Annotated[
    Path, Parameter(help="A log in SWF, or a CSV with `submitted_at` and `run_s`; gzipped or not.")
]
NodesFlag = Annotated[
    str | None,
    Parameter(help="What the trace ran on: `160x8`, `8xH100:8`, or processors in one pool: `240`."),
]
PolicyFlag = Annotated[
    Path | None, Parameter(help="Fields of the policy that differ from the default, YAML or JSON.")
]
MtbfFlag = Annotated[str | None, Parameter(help="How long a node works between two failures: `60d`.")]
RepairFlag = Annotated[str | None, Parameter(help="How long a failed node is away. Default 4h.")]
CheckpointFlag = Annotated[
    str | None, Parameter(help="Modelled checkpoints: how often, cost of one, cost of going on: `1h,30s,2m`.")
]

DEFAULT_REPAIR_S = 4 * 3600.0


def seconds_of(text: str, option: str) -> float:
    from shoal.spec.quantity import parse_seconds

    try:
        return parse_seconds(text)
    except ValueError as error:
        raise SpecError(f"`{option}`: {error}", hint=f"{option} 4h") from None


def failures_of(mtbf: str | None, repair: str | None, *, are_learned: bool = False) -> Failures | None:
    """`are_learned`: how often nodes fail may also be known from the past."""
    from shoal.sim.failures import Failures

    if repair and mtbf is None and not are_learned:
        raise SpecError(
            f"`--repair {repair}` says how long a failed node is away, and none fails without `--mtbf`",
            hint=f"--mtbf 60d --repair {repair}",
        )
    repair_s = seconds_of(repair, "--repair") if repair else DEFAULT_REPAIR_S
    return None if mtbf is None else Failures(mtbf_s=seconds_of(mtbf, "--mtbf"), repair_s=repair_s)


def warn_of_columns(trace: Path) -> None:
    """Name what a trace says that nobody reads: a column that is misspelt is a column that is missing."""
    from shoal.cli.show import note
    from shoal.sim.from_trace import COLUMNS_HINT, unread_columns

    unread = unread_columns(trace)
    if unread:
        note(f"warning: {trace.name}: not read: {', '.join(unread)}; {COLUMNS_HINT}")


def checkpoints_of(text: str | None) -> Checkpoints:
    from shoal.sim.checkpoints import Checkpoints

    if text is None:
        return Checkpoints()
    parts = [seconds_of(part, "--checkpoint") for part in text.split(",")]
    if len(parts) > 3:
        raise SpecError(f"`--checkpoint {text}`: at most three times", hint="--checkpoint 1h,30s,2m")
    interval_s, cost_s, restart_s = (*parts, *[0.0] * (3 - len(parts)))
    return Checkpoints(interval_s=interval_s, cost_s=cost_s, restart_s=restart_s)


def times_of(text: str, option: str) -> float:
    """`2x` is 2."""
    try:
        found = float(text.removesuffix("x"))
    except ValueError:
        found = 0.0
    if not 0 < found < 1e6:
        raise SpecError(f"`{option} {text}`: how many times as many, such as `2x`", hint=f"{option} 2x")
    return found
