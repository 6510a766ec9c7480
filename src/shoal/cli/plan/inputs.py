"""What `whatif` and `plan` share: flags, requested changes, this cluster's past, and the simulations.

Flags are read first, before anything that takes long; the changes apply to the past or the trace afterwards.
Simulations run in processes of their own. A bar, or lines in a pipe, show how many are done.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, Self

from cyclopts import Parameter

from shoal.cli.flags import connect
from shoal.cli.output import note
from shoal.cli.progress import long_work
from shoal.errors import SpecError

if TYPE_CHECKING:
    from shoal.sim.assumptions import CheckpointModel, NodeFailureModel

Trace = Annotated[
    Path, Parameter(help="A log in SWF, or a CSV with `submitted_at` and `run_s`; gzipped or not.")
]
NodesFlag = Annotated[
    str | None,
    Parameter(help="What the trace ran on: `160x8`, `8xH100:8`, or processors in one pool: `240`."),
]
PolicyFlag = Annotated[
    Path | None, Parameter(help="Policy fields that differ from the default, YAML or JSON.")
]
MtbfFlag = Annotated[str | None, Parameter(help="Mean time between failures of a node: `60d`.")]
RepairFlag = Annotated[str | None, Parameter(help="How long a failed node is down. Default 4h.")]
CheckpointFlag = Annotated[
    str | None, Parameter(help="Modelled checkpoints: interval, cost of one, cost of a resume: `1h,30s,2m`.")
]

DEFAULT_REPAIR_S = 4 * 3600.0


def parse_duration(text: str, option: str) -> float:
    from shoal.spec.quantity import parse_seconds

    try:
        return parse_seconds(text)
    except ValueError as error:
        raise SpecError(f"`{option}`: {error}", hint=f"{option} 4h") from None


def parse_failures(
    mtbf: str | None, repair: str | None, *, are_learned: bool = False
) -> NodeFailureModel | None:
    """Read the failure model. `are_learned`: the failure rate may also come from the past."""
    from shoal.sim.assumptions import NodeFailureModel

    if repair and mtbf is None and not are_learned:
        raise SpecError(
            f"`--repair {repair}` says how long a failed node is down, and none fails without `--mtbf`",
            hint=f"--mtbf 60d --repair {repair}",
        )
    repair_s = parse_duration(repair, "--repair") if repair else DEFAULT_REPAIR_S
    return (
        None if mtbf is None else NodeFailureModel(mtbf_s=parse_duration(mtbf, "--mtbf"), repair_s=repair_s)
    )


def warn_of_columns(trace: Path) -> None:
    """Print a note on columns that are not read: a misspelt column counts as missing."""
    from shoal.cli.output import note
    from shoal.sim.from_trace import COLUMNS_HINT, unread_columns

    unread = unread_columns(trace)
    if unread:
        note(f"warning: {trace.name}: not read: {', '.join(unread)}; {COLUMNS_HINT}")


def parse_checkpoints(text: str | None) -> CheckpointModel:
    from shoal.sim.assumptions import CheckpointModel

    if text is None:
        return CheckpointModel()
    parts = [parse_duration(part, "--checkpoint") for part in text.split(",")]
    if len(parts) > 3:
        raise SpecError(f"`--checkpoint {text}`: at most three durations", hint="--checkpoint 1h,30s,2m")
    interval_s, cost_s, restart_s = (*parts, *[0.0] * (3 - len(parts)))
    return CheckpointModel(interval_s=interval_s, cost_s=cost_s, restart_s=restart_s)


def parse_factor(text: str, option: str) -> float:
    """Read `2x` as 2."""
    try:
        factor = float(text.removesuffix("x"))
    except ValueError:
        factor = 0.0
    if not 0 < factor < 1e6:
        raise SpecError(f"`{option} {text}` is not a factor such as `2x`", hint=f"{option} 2x")
    return factor


if TYPE_CHECKING:
    from shoal.scheduler import Policy
    from shoal.sim.cluster_shapes import ClusterShape
    from shoal.sim.scenario import Scenario


class RequestedChanges(NamedTuple):
    shapes: list[ClusterShape]
    removed: tuple[str, ...]
    quotas: dict[str, float]
    policy: Policy | None
    failures: float | None
    """A factor on how often nodes fail."""
    descriptions: list[str]
    """The changes as they were typed."""


def parse_changes(
    add: tuple[str, ...],
    remove: tuple[str, ...],
    quota: tuple[str, ...],
    policy: Path | None,
    failures: str | None,
) -> RequestedChanges:
    """Read the flags. Raise `SpecError` for what is wrong whatever the past or the trace looks like."""
    from shoal.control.commands.policy import read_policy
    from shoal.sim.cluster_shapes import parse_shape
    from shoal.sim.workload_changes import parse_quotas

    typed = {"add": add, "remove": remove, "quota": quota}
    descriptions = [f"{word} {text}" for word, texts in typed.items() for text in texts]
    descriptions += [f"policy {policy.name}"] if policy else []
    descriptions += [f"failures {failures}"] if failures else []
    return RequestedChanges(
        shapes=[parse_shape(text, "--add") for text in add],
        removed=remove,
        quotas=parse_quotas(quota),
        policy=read_policy(policy) if policy else None,
        failures=parse_factor(failures, "--failures") if failures else None,
        descriptions=descriptions,
    )


def apply_changes(before: Scenario, changes: RequestedChanges) -> Scenario:
    """Apply the changes. Raise `SpecError` if the past or the trace has no such node or project."""
    import msgspec

    from shoal.scheduler.placement.power import unknown_racks
    from shoal.sim.workload_changes import with_nodes, with_quotas, without_nodes

    workload = without_nodes(with_nodes(before.workload, changes.shapes), changes.removed)
    after = msgspec.structs.replace(before, workload=with_quotas(workload, changes.quotas))
    if changes.policy is not None:
        unknown = unknown_racks(changes.policy.power_caps, (node.labels for node in after.workload.nodes))
        if unknown is not None:
            note(f"warning: {unknown}")
        after = msgspec.structs.replace(after, policy=changes.policy)
    if changes.failures is not None and before.failures is not None:
        after = msgspec.structs.replace(after, failures=before.failures.more_often(changes.failures))
    return after


if TYPE_CHECKING:
    from shoal.sim.history.facts import Fact
    from shoal.sim.history.past import Past


def read_past() -> tuple[list[tuple[int, Fact]], Past]:
    """Read the whole log as facts and as a workload. Needs a role for all projects."""
    from shoal.cli.plan.decision import read_whole_log
    from shoal.sim.history.facts import facts_of
    from shoal.sim.history.past import past_of

    with connect() as shoal:
        facts = list(facts_of(read_whole_log(shoal)))
    past = past_of(facts)
    if not past.workload.jobs:
        raise SpecError("this cluster has run no job yet, so it has no past", hint="name a trace to simulate")
    return facts, past


if TYPE_CHECKING:
    from shoal.sim.report import SimulationReport
    from shoal.sim.scenario import Scenario

ShowProgress = Callable[[int, int, str], None]
"""How many are done, how many there are, and what they simulate."""


class SimulationPool:
    def __init__(self, at_once: int) -> None:
        from shoal.sim.scenario import pool

        self._pool = pool(at_once)
        self._shown = ExitStack()
        self._num_done = 0
        self._show_progress: ShowProgress

    def __enter__(self) -> Self:
        self._show_progress = self._shown.enter_context(_bar() if sys.stderr.isatty() else _lines())
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def simulate(self, scenarios: Sequence[Scenario]) -> list[SimulationReport]:
        from concurrent.futures import as_completed

        from shoal.sim.sizing import simulate_report

        sizes = ", ".join(f"{scenario.workload.capacity:,.0f}" for scenario in scenarios)
        about = f"on {sizes} {scenarios[0].workload.device}s"
        total = self._num_done + len(scenarios)
        self._show_progress(self._num_done, total, about)
        futures = [self._pool.submit(simulate_report, scenario) for scenario in scenarios]
        for _ in as_completed(futures):
            self._num_done += 1
            self._show_progress(self._num_done, total, about)
        return [future.result() for future in futures]


@contextmanager
def _bar() -> Iterator[ShowProgress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        transient=True,
    ) as bar:
        task = bar.add_task("", total=0)
        yield lambda done, total, about: bar.update(task, completed=done, total=total, description=about)


@contextmanager
def _lines() -> Iterator[ShowProgress]:
    with long_work("simulating") as say:
        yield lambda done, total, about: say(f"simulating {about}, {done} of {total} simulations done")
