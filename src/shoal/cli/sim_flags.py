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


def failures_of(mtbf: str | None, repair: str | None) -> Failures | None:
    from shoal.sim.failures import Failures

    repair_s = seconds_of(repair, "--repair") if repair else DEFAULT_REPAIR_S
    return None if mtbf is None else Failures(mtbf_s=seconds_of(mtbf, "--mtbf"), repair_s=repair_s)


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
