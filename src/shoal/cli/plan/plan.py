"""`shoal plan`: find the smallest cluster that meets a target, and what it costs."""

from __future__ import annotations

import os
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter

from shoal.cli.flags import JsonFlag
from shoal.cli.output import print_folded, print_json, print_table
from shoal.cli.plan.inputs import (
    CheckpointFlag,
    MtbfFlag,
    PolicyFlag,
    RepairFlag,
    SimulationPool,
    Trace,
    parse_checkpoints,
    parse_failures,
    read_past,
    warn_of_columns,
)
from shoal.cli.progress import long_work
from shoal.errors import SpecError

if TYPE_CHECKING:
    from shoal.sim.cluster_shapes import ClusterShape, PlannedFleet
    from shoal.sim.scenario import Scenario
    from shoal.sim.sizing import PlanTarget, SizingResult, Trial

HOURS = 720
"""Hours of a month of 30 days."""

TargetFlag = Annotated[str, Parameter(help="The target: `p95 wait < 10m`, `mean slowdown < 5`.")]
ShapeFlag = Annotated[
    str | None,
    Parameter(
        help="The kind of node to count and today's number: `8xH100:8`, or processors: `240`. "
        "Default: this cluster's own."
    ),
]
GrowthFlag = Annotated[str, Parameter(help="Growth of the number of jobs: `30%/month`. Default: none.")]
HorizonFlag = Annotated[float, Parameter(help="Months from now. Default 3.")]
PriceFlag = Annotated[float | None, Parameter(help="Price of one device for an hour, in your currency.")]
WattsFlag = Annotated[float | None, Parameter(help="Power of one device in use, cooling included.")]
ProcessesFlag = Annotated[int | None, Parameter(help="Simulations at once. Default: the CPUs here.")]


def plan(
    trace: Trace | None = None,
    *,
    target: TargetFlag,
    nodes: ShapeFlag = None,
    growth: GrowthFlag = "0%",
    horizon: HorizonFlag = 3,
    price: PriceFlag = None,
    watts: WattsFlag = None,
    policy: PolicyFlag = None,
    mtbf: MtbfFlag = None,
    repair: RepairFlag = None,
    checkpoint: CheckpointFlag = None,
    processes: ProcessesFlag = None,
    json: JsonFlag = False,
) -> int:
    """Find the smallest cluster that meets a target, by simulating many sizes.

    The scheduler that runs the cluster makes every decision. The history or the
    trace is today's demand; `--growth` says how fast it grows.
    """
    import msgspec

    from shoal.control.commands.policy import read_policy
    from shoal.sim.cluster_shapes import parse_shape
    from shoal.sim.sizing import parse_target, smallest_cluster
    from shoal.sim.workload_changes import grown, span_s
    from shoal.sim.workload_changes import growth as growth_of

    wanted, shape = parse_target(target), parse_shape(nodes, "--nodes") if nodes else None
    times = growth_of(growth, horizon)
    rules = read_policy(policy) if policy else None
    rate, written = parse_failures(mtbf, repair), parse_checkpoints(checkpoint)
    _check_amounts(processes, price, watts)
    basis, fleet = _of_trace(trace, shape) if trace else _of_past(shape)
    scenario = msgspec.structs.replace(
        basis,
        workload=grown(basis.workload, times),
        policy=rules or basis.policy,
        failures=rate,
        checkpoints=written,
    )
    at_once = processes or os.cpu_count() or 1
    with SimulationPool(at_once) as bench:
        answer = smallest_cluster(scenario, fleet, wanted, bench.simulate, at_once=at_once)
    bill = bill_of(answer, price, watts)
    history = History(span_s(basis.workload), len(basis.workload.jobs))
    if json:
        print_json(
            {
                "is_simulated": True,
                "trace": str(trace) if trace else None,
                "target": wanted.text,
                "times_the_jobs": times,
                "history": {**history._asdict(), "is_short": history.is_short},
                "assumed": {"price": price, "watts": watts},
                **bill,
                **_facts(answer),
            }
        )
        return 0
    source = trace.name if trace else "this cluster's history"
    grew = _growth_text(growth, horizon) if times != 1 else ""
    more = f"{times:.2f} times those of {source}{grew}"
    print_folded(f"simulated: {len(scenario.workload.jobs):,} jobs, {more}")
    print_folded(f"history: {history.summary()}")
    _print(answer, wanted, today=fleet.count)
    _print_bill(answer, bill, history, price, watts)
    return 0


def _facts(answer: SizingResult) -> dict[str, Any]:
    import msgspec

    return {
        "nodes": str(answer.fleet),
        "num_nodes": answer.fleet.count,
        "num_devices": answer.fleet.devices,
        "trials": msgspec.to_builtins(answer.trials),
        "report": msgspec.to_builtins(answer.report),
    }


def _growth_text(growth: str, horizon: float) -> str:
    return f" ({growth} over {horizon:g} month{'s' * (horizon != 1)})"


class History(NamedTuple):
    """The history a plan is made from: how long it is, and how many jobs it has."""

    span_s: float
    num_jobs: int

    @property
    def is_short(self) -> bool:
        from shoal.sim.workload_changes import SHORT_S

        return self.span_s < SHORT_S

    def summary(self) -> str:
        text = f"{_span_text(self.span_s)}, {self.num_jobs:,} job{'s' * (self.num_jobs != 1)}"
        return f"{text}: too short to say much about a month" if self.is_short else text

    def caveat(self) -> str:
        """Return what to add to every monthly amount that comes from a short history."""
        return f"; from {_span_text(self.span_s)} of history" if self.is_short else ""


def _span_text(span_s: float) -> str:
    """Return a span; short ones in seconds, because they are compared with run times."""
    from shoal.sim.compare import seconds

    return f"{span_s:.0f} s" if span_s < 600 else seconds(span_s)


def _check_amounts(processes: int | None, price: float | None, watts: float | None) -> None:
    if processes is not None and processes < 1:
        raise SpecError(f"`--processes {processes}`: at least one", hint="--processes 2")
    for flag, amount in (("--price", price), ("--watts", watts)):
        if amount is not None and not 0 <= amount < inf:
            raise SpecError(f"`{flag} {amount:g}`: 0 or more", hint=f"{flag} 2.5")


def _of_trace(trace: Path, shape: ClusterShape | None) -> tuple[Scenario, PlannedFleet]:
    from shoal.sim.cluster_shapes import PlannedFleet
    from shoal.sim.from_trace import read_workload
    from shoal.sim.scenario import Scenario

    if shape is None:
        raise SpecError(
            f"a plan counts nodes: which, and how many are there today, did {trace.name} run on?",
            hint="--nodes 8xH100:8, or processors: --nodes 240",
        )
    with long_work(f"reading {trace.name}"):
        inputs = Scenario(workload=read_workload(trace, shape)), PlannedFleet(shape)
    warn_of_columns(trace)
    return inputs


def _of_past(shape: ClusterShape | None) -> tuple[Scenario, PlannedFleet]:
    from shoal.sim.cluster_shapes import fleet_of
    from shoal.sim.scenario import Scenario

    with long_work("reading the history"):
        _, past = read_past()
    return Scenario(workload=past.workload, policy=past.policy), fleet_of(past.nodes, shape)


def bill_of(answer: SizingResult, price: float | None, watts: float | None) -> dict[str, float]:
    """Return what the answer costs in a month, for the prices that were given."""
    devices, used = answer.fleet.devices, answer.report.utilisation
    bill: dict[str, float] = {}
    if price is not None:
        bill["money_per_month"] = devices * price * HOURS
    if watts is not None:
        bill["kwh_per_month"] = devices * used * watts * HOURS / 1000
        bill["kw_at_most"] = devices * watts / 1000
    return bill


def _print(answer: SizingResult, target: PlanTarget, today: int) -> None:
    from shoal.sim.compare import seconds
    from shoal.sim.sizing import TargetMeasure

    def shown(value: float) -> str:
        return f"{value:,.2f}" if target.measure is TargetMeasure.SLOWDOWN else seconds(value)

    measure = f"{target.statistic} {target.measure}"
    counted = answer.fleet.unit
    rows: list[tuple[Any, ...]] = [
        (
            f"{trial.num_nodes:,}" + (" (today)" if trial.num_nodes == today else ""),
            f"{answer.fleet.of(trial.num_nodes).devices:,}",
            shown(trial.value),
            _verdict(trial),
        )
        for trial in answer.trials
    ]
    print_table((counted.upper(), "DEVICES", measure.upper(), "TARGET"), rows, elastic="TARGET")
    report = answer.report
    print_folded(
        f"smallest that meets `{target.text}`: {answer.fleet} ({answer.fleet.devices:,} {report.device}s, "
        f"{answer.fleet.count - today:+,} {counted}), {measure} {shown(target.value(report))}, "
        f"utilisation {report.utilisation:.0%}"
    )


def _verdict(trial: Trial) -> str:
    if trial.num_refused:
        return f"missed: {trial.num_refused:,} job{'s' * (trial.num_refused > 1)} would not fit on any node"
    return "met" if trial.is_met else "missed"


def _print_bill(
    answer: SizingResult, bill: dict[str, float], history: History, price: float | None, watts: float | None
) -> None:
    device, caveat = answer.report.device, history.caveat()
    if price is None:
        print_folded("money: not computed; give the price of a device-hour with `--price`")
    else:
        parts = f"{bill['money_per_month']:,.0f} a month"
        print_folded(
            f"money: {parts} (assumed: {price:g} a {device}-hour, {HOURS} hours, used or not{caveat})"
        )
    if watts is None:
        print_folded("energy: not computed; give the power of a device with `--watts`")
    else:
        parts = f"{bill['kwh_per_month']:,.0f} kWh a month, at most {bill['kw_at_most']:,.1f} kW"
        print_folded(
            f"energy: {parts} (assumed: {watts:g} W a {device} in use, none while it is idle{caveat})"
        )
