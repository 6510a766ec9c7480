"""`shoal whatif`: the past or a trace through the production scheduler, as it was and with a change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter

from shoal.cli.changes import Asked, changed, read_asked
from shoal.cli.flags import JsonFlag
from shoal.cli.past import read_past
from shoal.cli.progress import long_work
from shoal.cli.show import note, print_folded, print_json, print_table
from shoal.cli.sim_flags import (
    CheckpointFlag,
    MtbfFlag,
    NodesFlag,
    PolicyFlag,
    RepairFlag,
    Trace,
    checkpoints_of,
    failures_of,
    seconds_of,
    warn_of_columns,
)
from shoal.errors import SpecError

if TYPE_CHECKING:
    from shoal.sim.checkpoints import Checkpoints
    from shoal.sim.failures import Failures
    from shoal.sim.history.losses import Losses
    from shoal.sim.outcome import Outcome
    from shoal.sim.report import Report
    from shoal.sim.scenario import Scenario

AddFlag = Annotated[
    tuple[str, ...], Parameter(negative="", help="With more nodes: `8xH100:8`; with more processors: `64`.")
]
RemoveFlag = Annotated[
    tuple[str, ...], Parameter(negative="", help="Without a node, by name, or without so many: `4x8`.")
]
QuotaFlag = Annotated[
    tuple[str, ...], Parameter(negative="", help="With so many devices guaranteed to a project: `vision=64`.")
]
FailuresFlag = Annotated[
    str | None,
    Parameter(help="Nodes fail so many times as often as they did, or as `--mtbf` says: `2x`."),
]
PlotFlag = Annotated[Path | None, Parameter(help="Draw queue, use and waits into this .png or .svg.")]


def whatif(
    trace: Trace | None = None,
    *,
    nodes: NodesFlag = None,
    add: AddFlag = (),
    remove: RemoveFlag = (),
    quota: QuotaFlag = (),
    policy: PolicyFlag = None,
    failures: FailuresFlag = None,
    mtbf: MtbfFlag = None,
    repair: RepairFlag = None,
    checkpoint: CheckpointFlag = None,
    plot: PlotFlag = None,
    json: JsonFlag = False,
) -> int:
    """Simulate this cluster's own past, or a trace, with something changed.

    Every decision is made by the scheduler that runs the cluster; run times come
    from the past. Prints what there was, what there would be, and the change.
    Without a trace every recorded decision is made again first, and those that
    differ are counted.
    """
    from shoal.sim.report import report
    from shoal.sim.scenario import play_all

    if plot:
        _can_draw(plot)
    if nodes and not trace:
        raise SpecError(
            f"`--nodes {nodes}` says what a trace ran on; this cluster's own past knows its nodes",
            hint=f"`shoal whatif --add {nodes}`, or `shoal whatif TRACE --nodes {nodes}`",
        )
    asked = read_asked(add, remove, quota, policy, failures)
    if trace and failures and mtbf is None:
        raise SpecError(
            f"`--failures {failures}`: so many times as often as what? A trace records no failures",
            hint=f"--mtbf 60d --failures {failures}",
        )
    rate = failures_of(mtbf, repair, are_learned=failures is not None)
    written = checkpoints_of(checkpoint)
    basis = _of_trace(trace, nodes, rate) if trace else _of_past(asked, rate, repair)
    before = _with(basis.scenario, written)
    scenarios = [before, changed(before, asked)] if asked.words else [before]
    with long_work(f"simulating {len(before.workload.jobs):,} jobs"):
        outcomes = play_all(scenarios)
    reports = [report(outcome) for outcome in outcomes]
    names = ("before", "after")[: len(reports)]
    source = trace.name if trace else "the history of this cluster"
    told = f"{source}, {', '.join(asked.words) or 'nothing changed'}"
    if json:
        import msgspec

        found = {name: msgspec.to_builtins(one) for name, one in zip(names, reports, strict=True)}
        facts = {"is_simulated": True, "trace": str(trace) if trace else None, "changes": asked.words}
        print_json({**facts, **basis.facts, **found})
    else:
        for line in basis.lines:
            print_folded(line)
        print(f"simulated: {told}")
        _print(reports)
    if plot:
        _draw(dict(zip(names, outcomes, strict=True)), plot, f"simulated: {told}")
    return 0


class _Basis(NamedTuple):
    """What is simulated, and what there is to say about it first."""

    scenario: Scenario
    lines: list[str]
    facts: dict[str, Any]


def _of_trace(trace: Path, nodes: str | None, rate: Failures | None) -> _Basis:
    from shoal.sim.from_trace import read_workload
    from shoal.sim.machines import parse_shape
    from shoal.sim.scenario import Scenario

    shape = parse_shape(nodes, "--nodes") if nodes else None
    with long_work(f"reading {trace.name}"):
        workload = read_workload(trace, shape)
    warn_of_columns(trace)
    return _Basis(Scenario(workload=workload, failures=rate), [], {})


def _of_past(asked: Asked, rate: Failures | None, repair: str | None) -> _Basis:
    """The cluster's past, how many of its decisions come out equal when they are made again, its failures."""
    import msgspec

    from shoal.sim.compare import seconds
    from shoal.sim.history.losses import losses_in, without_losses
    from shoal.sim.history.replay import Replay
    from shoal.sim.scenario import Scenario

    with long_work("reading the history"):
        facts, past = read_past()
    with long_work("making its decisions again"):
        equal = [verdict.is_equal for verdict in Replay().verdicts(facts)]
    again = {
        "made": len(equal),
        "equal": sum(equal),
        "given_up": past.num_given_up,
        "open": past.num_open,
    }
    basis = _Basis(Scenario(workload=past.workload, policy=past.policy), [_told_again(again)], {})
    basis.facts["decisions"] = again
    if rate is None and asked.failures is None:
        return basis
    losses = losses_in(facts)
    drawn = rate or losses.rate(seconds_of(repair, "--repair") if repair else None)
    if drawn is None:
        raise SpecError(
            f"`--failures`: in {seconds(losses.service_s)} of node time that are recorded no node failed",
            hint="say how often one does: --mtbf 60d",
        )
    recorded = msgspec.to_builtins(losses)
    basis.facts["failures"] = {"mtbf_s": drawn.mtbf_s, "repair_s": drawn.repair_s, "recorded": recorded}
    basis.lines.append(_told_failures(drawn, losses, is_learned=rate is None))
    workload = without_losses(past.workload)
    return basis._replace(scenario=msgspec.structs.replace(basis.scenario, workload=workload, failures=drawn))


def _told_failures(drawn: Failures, losses: Losses, *, is_learned: bool) -> str:
    from shoal.sim.compare import seconds

    recorded = f"{losses.num_failures} that are recorded in {seconds(losses.service_s)} of node time"
    told = (
        f"failures: drawn, a node fails every {seconds(drawn.mtbf_s)} and is away {seconds(drawn.repair_s)}"
    )
    return f"{told}; {'learned from' if is_learned else 'instead of'} the {recorded}"


def _told_again(again: dict[str, int]) -> str:
    told = f"made again: {again['equal']} of {again['made']} recorded decisions come out equal"
    if again["given_up"]:
        told += f"; {again['given_up']} jobs given up before they ran are left out"
    if again["open"]:
        told += f"; {again['open']} run or wait now and are taken to run as long as is expected"
    return told


def _with(scenario: Scenario, checkpoints: Checkpoints) -> Scenario:
    import msgspec

    return msgspec.structs.replace(scenario, checkpoints=checkpoints)


def _print(reports: list[Report]) -> None:
    from shoal.sim.compare import overall_rows, project_rows, single_rows, user_rows

    if len(reports) == 1:
        print_table(("", "SIMULATED"), single_rows(reports[0]), elastic="")
        return
    print_table(("", "BEFORE", "AFTER", "CHANGE"), overall_rows(*reports), elastic="")
    if len(reports[0].projects) > 1:
        print()
        heads = (
            "PROJECT",
            "JOBS",
            "MEAN WAIT",
            "AFTER",
            "CHANGE",
            "P95 WAIT",
            "AFTER",
            "CHANGE",
            "MISSED",
            "AFTER",
        )
        print_table(heads, project_rows(*reports), elastic="PROJECT")
    if users := user_rows(*reports):
        print()
        print_table(("USER (WORST OFF)", "MISSED", "AFTER", "CHANGE"), users, elastic="USER (WORST OFF)")


def _can_draw(path: Path) -> None:
    """Asked first: a simulation may take minutes."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise SpecError(
            "`--plot` needs matplotlib, which is not installed", hint="pip install 'shoal[plots]'"
        )
    from shoal.sim.plot import check_path

    check_path(path)


def _draw(outcomes: dict[str, Outcome], path: Path, title: str) -> None:
    from shoal.sim.plot import draw

    draw(outcomes, path, title)
    note(f"drawn: {path}")
