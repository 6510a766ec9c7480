"""`shoal plan`: the smallest cluster that meets a target, with what it costs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Self

from cyclopts import Parameter

from shoal.cli.flags import JsonFlag
from shoal.cli.show import print_json, print_table
from shoal.cli.sim_flags import (
    CheckpointFlag,
    MtbfFlag,
    PolicyFlag,
    RepairFlag,
    Trace,
    checkpoints_of,
    failures_of,
)

if TYPE_CHECKING:
    from shoal.sim.report import Report
    from shoal.sim.scenario import Scenario
    from shoal.sim.smallest import Answer
    from shoal.sim.target import Target

HOURS = 720
"""Of a month of 30 days."""

TargetFlag = Annotated[str, Parameter(help="What must hold: `p95 wait < 10m`, `mean slowdown < 5`.")]
ShapeFlag = Annotated[
    str,
    Parameter(help="The nodes to count, with how many there are today: `8xH100:8`, or processors: `240`."),
]
GrowthFlag = Annotated[str, Parameter(help="More jobs by then: `30%/month`. Default: none.")]
HorizonFlag = Annotated[float, Parameter(help="Months from now. Default 3.")]
PriceFlag = Annotated[float | None, Parameter(help="Of one device for an hour, in your currency.")]
WattsFlag = Annotated[float | None, Parameter(help="What one device in use draws, cooling included.")]
ProcessesFlag = Annotated[int | None, Parameter(help="Simulations at a time. Default: the CPUs here.")]


def plan(
    trace: Trace,
    *,
    target: TargetFlag,
    nodes: ShapeFlag,
    growth: GrowthFlag = "0%",
    horizon: HorizonFlag = 3,
    price: PriceFlag = None,
    watts: WattsFlag = None,
    policy: PolicyFlag = None,
    mtbf: MtbfFlag = None,
    repair: RepairFlag = "4h",
    checkpoint: CheckpointFlag = None,
    processes: ProcessesFlag = None,
    json: JsonFlag = False,
) -> int:
    """Find the smallest cluster that meets a target, by simulating several sizes at a time.

    Every decision is made by the scheduler that runs the cluster; the trace is what
    people ask for today, and `--growth` how much more of the same they will.
    """
    from shoal.control.policy_file import read_policy
    from shoal.scheduler import Policy
    from shoal.sim.from_trace import read_workload
    from shoal.sim.grow import grown
    from shoal.sim.grow import growth as growth_of
    from shoal.sim.machines import parse_shape
    from shoal.sim.scenario import Scenario
    from shoal.sim.smallest import smallest
    from shoal.sim.target import parse_target

    wanted, shape = parse_target(target), parse_shape(nodes, "--nodes")
    times = growth_of(growth, horizon)
    scenario = Scenario(
        workload=grown(read_workload(trace, shape), times),
        policy=read_policy(policy) if policy else Policy(),
        failures=failures_of(mtbf, repair),
        checkpoints=checkpoints_of(checkpoint),
    )
    at_once = processes or os.cpu_count() or 1
    with _Bench(at_once) as bench:
        answer = smallest(scenario, shape, wanted, bench.simulate, at_once=at_once)
    bill = bill_of(answer, price, watts)
    if json:
        import msgspec

        print_json(
            {
                "is_simulated": True,
                "trace": str(trace),
                "target": wanted.text,
                "times_the_jobs": times,
                "nodes": str(answer.shape),
                "num_nodes": answer.shape.count,
                "num_devices": answer.shape.devices,
                "assumed": {"price": price, "watts": watts},
                **bill,
                "trials": msgspec.to_builtins(answer.trials),
                "report": msgspec.to_builtins(answer.report),
            }
        )
        return 0
    print(f"simulated: {len(scenario.workload.jobs):,} jobs, {times:.2f} times those of {trace.name}")
    _print(answer, wanted, today=shape.count)
    _print_bill(answer, bill, price, watts)
    return 0


class _Bench:
    """Processes that simulate, and a bar that says how many simulations are done."""

    def __init__(self, at_once: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        from shoal.sim.scenario import pool

        self._pool = pool(at_once)
        self._bar = Progress(
            TextColumn("simulating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=Console(file=sys.stderr),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("", total=0)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def simulate(self, scenarios: Sequence[Scenario]) -> list[Report]:
        from concurrent.futures import as_completed

        from shoal.sim.smallest import simulated

        sizes = ", ".join(str(len(one.workload.nodes)) for one in scenarios)
        done = int(self._bar.tasks[0].completed)
        self._bar.update(self._task, total=done + len(scenarios), description=f"{sizes} nodes")
        futures = [self._pool.submit(simulated, one) for one in scenarios]
        for _ in as_completed(futures):
            self._bar.advance(self._task)
        return [future.result() for future in futures]


def bill_of(answer: Answer, price: float | None, watts: float | None) -> dict[str, float]:
    """What the answer costs in a month, as far as prices were given."""
    devices, used = answer.shape.devices, answer.report.utilisation
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
    counted = "NODES" if answer.shape.gpus else "PROCESSORS"
    rows: list[tuple[Any, ...]] = [
        (
            f"{trial.num_nodes:,}" + (" (today)" if trial.num_nodes == today else ""),
            f"{answer.shape.of(trial.num_nodes).devices:,}",
            shown(trial.value),
            "met" if trial.is_met else "missed",
        )
        for trial in answer.trials
    ]
    print_table((counted, "DEVICES", measure.upper(), "TARGET"), rows, elastic="TARGET")
    what = answer.report
    print(
        f"smallest that meets `{target.text}`: {answer.shape} ({answer.shape.devices:,} {what.device}s, "
        f"{answer.shape.count - today:+,} {counted.lower()}), {measure} {shown(target.value(what))}, "
        f"utilisation {what.utilisation:.0%}"
    )


def _print_bill(answer: Answer, bill: dict[str, float], price: float | None, watts: float | None) -> None:
    device = answer.report.device
    if price is None:
        print("money: not computed; say what a device costs with `--price`")
    else:
        told = f"{bill['money_per_month']:,.0f} a month"
        print(f"money: {told} (assumed: {price:g} a {device}-hour, {HOURS} hours, used or not)")
    if watts is None:
        print("energy: not computed; say what a device draws with `--watts`")
    else:
        told = f"{bill['kwh_per_month']:,.0f} kWh a month, at most {bill['kw_at_most']:,.1f} kW"
        print(f"energy: {told} (assumed: {watts:g} W a {device} in use, nothing while it is not)")
