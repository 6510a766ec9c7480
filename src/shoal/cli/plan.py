"""`shoal plan`: the smallest cluster that meets a target, with what it costs."""

from __future__ import annotations

import os
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter

from shoal.cli.bench import Bench
from shoal.cli.flags import JsonFlag
from shoal.cli.past import read_past
from shoal.cli.progress import long_work
from shoal.cli.show import print_folded, print_json, print_table
from shoal.cli.sim_flags import (
    CheckpointFlag,
    MtbfFlag,
    PolicyFlag,
    RepairFlag,
    Trace,
    checkpoints_of,
    failures_of,
    warn_of_columns,
)
from shoal.errors import SpecError

if TYPE_CHECKING:
    from shoal.sim.fleet import Fleet
    from shoal.sim.machines import Shape
    from shoal.sim.scenario import Scenario
    from shoal.sim.smallest import Answer, Trial
    from shoal.sim.target import Target

HOURS = 720
"""Of a month of 30 days."""

TargetFlag = Annotated[str, Parameter(help="What must hold: `p95 wait < 10m`, `mean slowdown < 5`.")]
ShapeFlag = Annotated[
    str | None,
    Parameter(
        help="The nodes to count, with how many there are today: `8xH100:8`, or processors: `240`. "
        "Default: this cluster's own."
    ),
]
GrowthFlag = Annotated[str, Parameter(help="More jobs by then: `30%/month`. Default: none.")]
HorizonFlag = Annotated[float, Parameter(help="Months from now. Default 3.")]
PriceFlag = Annotated[float | None, Parameter(help="Of one device for an hour, in your currency.")]
WattsFlag = Annotated[float | None, Parameter(help="What one device in use draws, cooling included.")]
ProcessesFlag = Annotated[int | None, Parameter(help="Simulations at a time. Default: the CPUs here.")]


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

    Every decision is made by the scheduler that runs the cluster. Its history, or
    the trace, is what people ask for today, `--growth` how much more they will.
    """
    import msgspec

    from shoal.control.policy_file import read_policy
    from shoal.sim.grow import grown, span_s
    from shoal.sim.grow import growth as growth_of
    from shoal.sim.machines import parse_shape
    from shoal.sim.smallest import smallest
    from shoal.sim.target import parse_target

    wanted, shape = parse_target(target), parse_shape(nodes, "--nodes") if nodes else None
    times = growth_of(growth, horizon)
    rules = read_policy(policy) if policy else None
    rate, written = failures_of(mtbf, repair), checkpoints_of(checkpoint)
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
    with Bench(at_once) as bench:
        answer = smallest(scenario, fleet, wanted, bench.simulate, at_once=at_once)
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
    grew = _grew(growth, horizon) if times != 1 else ""
    more = f"{times:.2f} times those of {source}{grew}"
    print_folded(f"simulated: {len(scenario.workload.jobs):,} jobs, {more}")
    print_folded(f"history: {history.told()}")
    _print(answer, wanted, today=fleet.count)
    _print_bill(answer, bill, history, price, watts)
    return 0


def _facts(answer: Answer) -> dict[str, Any]:
    import msgspec

    return {
        "nodes": str(answer.fleet),
        "num_nodes": answer.fleet.count,
        "num_devices": answer.fleet.devices,
        "trials": msgspec.to_builtins(answer.trials),
        "report": msgspec.to_builtins(answer.report),
    }


def _grew(growth: str, horizon: float) -> str:
    return f" ({growth} over {horizon:g} month{'s' * (horizon != 1)})"


class History(NamedTuple):
    """What a plan is made from: how long people submitted, and how much."""

    span_s: float
    num_jobs: int

    @property
    def is_short(self) -> bool:
        from shoal.sim.grow import SHORT_S

        return self.span_s < SHORT_S

    def told(self) -> str:
        told = f"{_long(self.span_s)}, {self.num_jobs:,} job{'s' * (self.num_jobs != 1)}"
        return f"{told}: too short to say much about a month" if self.is_short else told

    def doubt(self) -> str:
        """What must be said of every amount a month."""
        return f"; from {_long(self.span_s)} of history" if self.is_short else ""


def _long(span_s: float) -> str:
    """Minutes and less in seconds: a span is compared with times that jobs run."""
    from shoal.sim.compare import seconds

    return f"{span_s:.0f} s" if span_s < 600 else seconds(span_s)


def _check_amounts(processes: int | None, price: float | None, watts: float | None) -> None:
    if processes is not None and processes < 1:
        raise SpecError(f"`--processes {processes}`: at least one", hint="--processes 2")
    for flag, amount in (("--price", price), ("--watts", watts)):
        if amount is not None and not 0 <= amount < inf:
            raise SpecError(f"`{flag} {amount:g}`: 0 or more", hint=f"{flag} 2.5")


def _of_trace(trace: Path, shape: Shape | None) -> tuple[Scenario, Fleet]:
    from shoal.sim.fleet import Fleet
    from shoal.sim.from_trace import read_workload
    from shoal.sim.scenario import Scenario

    if shape is None:
        raise SpecError(
            f"a plan counts nodes: which, and how many are there today, on which {trace.name} ran?",
            hint="--nodes 8xH100:8, or processors: --nodes 240",
        )
    with long_work(f"reading {trace.name}"):
        found = Scenario(workload=read_workload(trace, shape)), Fleet(shape)
    warn_of_columns(trace)
    return found


def _of_past(shape: Shape | None) -> tuple[Scenario, Fleet]:
    from shoal.sim.fleet import fleet_of
    from shoal.sim.scenario import Scenario

    with long_work("reading the history"):
        _, past = read_past()
    return Scenario(workload=past.workload, policy=past.policy), fleet_of(past.nodes, shape)


def bill_of(answer: Answer, price: float | None, watts: float | None) -> dict[str, float]:
    """What the answer costs in a month, as far as prices were given."""
    devices, used = answer.fleet.devices, answer.report.utilisation
    bill: dict[str, float] = {}
    if price is not None:
        bill["money_per_month"] = devices * price * HOURS
    if watts is not None:
        bill["kwh_per_month"] = devices * used * watts * HOURS / 1000
        bill["kw_at_most"] = devices * watts / 1000
    return bill


def _print(answer: Answer, target: Target, today: int) -> None:
    from shoal.sim.compare import seconds
    from shoal.sim.target import Measure

    def shown(value: float) -> str:
        return f"{value:,.2f}" if target.measure is Measure.SLOWDOWN else seconds(value)

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
    what = answer.report
    print_folded(
        f"smallest that meets `{target.text}`: {answer.fleet} ({answer.fleet.devices:,} {what.device}s, "
        f"{answer.fleet.count - today:+,} {counted}), {measure} {shown(target.value(what))}, "
        f"utilisation {what.utilisation:.0%}"
    )


def _verdict(trial: Trial) -> str:
    if trial.num_refused:
        return f"missed: {trial.num_refused:,} job{'s' * (trial.num_refused > 1)} would fit nowhere"
    return "met" if trial.is_met else "missed"


def _print_bill(
    answer: Answer, bill: dict[str, float], history: History, price: float | None, watts: float | None
) -> None:
    device, doubt = answer.report.device, history.doubt()
    if price is None:
        print_folded("money: not computed; say what a device costs with `--price`")
    else:
        told = f"{bill['money_per_month']:,.0f} a month"
        print_folded(f"money: {told} (assumed: {price:g} a {device}-hour, {HOURS} hours, used or not{doubt})")
    if watts is None:
        print_folded("energy: not computed; say what a device draws with `--watts`")
    else:
        told = f"{bill['kwh_per_month']:,.0f} kWh a month, at most {bill['kw_at_most']:,.1f} kW"
        print_folded(
            f"energy: {told} (assumed: {watts:g} W a {device} in use, nothing while it is not{doubt})"
        )
