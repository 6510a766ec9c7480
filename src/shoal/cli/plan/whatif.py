"""`shoal whatif`: simulate the past or a trace with the production scheduler, as it was and with a change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter

from shoal.cli.flags import JsonFlag
from shoal.cli.output import note, print_folded, print_json, print_table
from shoal.cli.plan.inputs import (
    CheckpointFlag,
    MtbfFlag,
    NodesFlag,
    PolicyFlag,
    RepairFlag,
    RequestedChanges,
    Trace,
    apply_changes,
    parse_changes,
    parse_checkpoints,
    parse_duration,
    parse_failures,
    read_past,
    warn_of_columns,
)
from shoal.cli.progress import long_work
from shoal.errors import SpecError

if TYPE_CHECKING:
    from shoal.sim.assumptions import CheckpointModel, NodeFailureModel
    from shoal.sim.history.losses import RecordedFailures
    from shoal.sim.report import SimulationReport
    from shoal.sim.scenario import Scenario
    from shoal.sim.workload import SimulationOutcome

AddFlag = Annotated[
    tuple[str, ...], Parameter(negative="", help="Add nodes: `8xH100:8`; add processors: `64`.")
]
RemoveFlag = Annotated[
    tuple[str, ...], Parameter(negative="", help="Remove a node, by name, or a number of nodes: `4x8`.")
]
QuotaFlag = Annotated[
    tuple[str, ...], Parameter(negative="", help="Guarantee devices to a project: `vision=64`.")
]
FailuresFlag = Annotated[
    str | None,
    Parameter(help="Multiply the failure rate of the past, or of `--mtbf`: `2x`."),
]
PlotFlag = Annotated[Path | None, Parameter(help="Draw queue, use and waits into this .png or .svg file.")]


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

    The scheduler that runs the cluster makes every decision; run times come from
    the past. The command prints what there was, what there would be, and the
    change. Without a trace, it first replays every recorded decision and counts
    those that differ.
    """
    from shoal.sim.report import build_report
    from shoal.sim.scenario import play_all

    if plot:
        _can_draw(plot)
    if nodes and not trace:
        raise SpecError(
            f"`--nodes {nodes}` is for a trace; this cluster's own past has its nodes recorded",
            hint=f"`shoal whatif --add {nodes}`, or `shoal whatif TRACE --nodes {nodes}`",
        )
    changes = parse_changes(add, remove, quota, policy, failures)
    if trace and failures and mtbf is None:
        raise SpecError(
            f"`--failures {failures}` multiplies a failure rate, and a trace records none",
            hint=f"--mtbf 60d --failures {failures}",
        )
    rate = parse_failures(mtbf, repair, are_learned=failures is not None)
    written = parse_checkpoints(checkpoint)
    basis = _of_trace(trace, nodes, rate) if trace else _of_past(changes, rate, repair)
    before = _with_checkpoints(basis.scenario, written)
    scenarios = [before, apply_changes(before, changes)] if changes.descriptions else [before]
    with long_work(f"simulating {len(before.workload.jobs):,} jobs"):
        outcomes = play_all(scenarios)
    reports = [build_report(outcome) for outcome in outcomes]
    names = ("before", "after")[: len(reports)]
    source = trace.name if trace else "the history of this cluster"
    title = f"{source}, {', '.join(changes.descriptions) or 'no change'}"
    if json:
        import msgspec

        reports_by_name = {
            name: msgspec.to_builtins(report) for name, report in zip(names, reports, strict=True)
        }
        facts = {
            "is_simulated": True,
            "trace": str(trace) if trace else None,
            "changes": changes.descriptions,
        }
        print_json({**facts, **basis.facts, **reports_by_name})
    else:
        for line in basis.lines:
            print_folded(line)
        print(f"simulated: {title}")
        _print(reports)
    if plot:
        _draw(dict(zip(names, outcomes, strict=True)), plot, f"simulated: {title}")
    return 0


class _Basis(NamedTuple):
    """What is simulated, and the lines to print before the result."""

    scenario: Scenario
    lines: list[str]
    facts: dict[str, Any]


def _of_trace(trace: Path, nodes: str | None, rate: NodeFailureModel | None) -> _Basis:
    from shoal.sim.cluster_shapes import parse_shape
    from shoal.sim.from_trace import read_workload
    from shoal.sim.scenario import Scenario

    shape = parse_shape(nodes, "--nodes") if nodes else None
    with long_work(f"reading {trace.name}"):
        workload = read_workload(trace, shape)
    warn_of_columns(trace)
    return _Basis(Scenario(workload=workload, failures=rate), [], {})


def _of_past(changes: RequestedChanges, rate: NodeFailureModel | None, repair: str | None) -> _Basis:
    """Return the cluster's past, how many of its decisions come out equal in a replay, and its failures."""
    import msgspec

    from shoal.sim.compare import seconds
    from shoal.sim.history.losses import losses_in, without_losses
    from shoal.sim.history.replay import DecisionReplay
    from shoal.sim.scenario import Scenario

    with long_work("reading the history"):
        facts, past = read_past()
    with long_work("replaying its decisions"):
        equal = [verdict.is_equal for verdict in DecisionReplay().verdicts(facts)]
    again = {
        "made": len(equal),
        "equal": sum(equal),
        "given_up": past.num_given_up,
        "open": past.num_open,
    }
    basis = _Basis(Scenario(workload=past.workload, policy=past.policy), [_replay_text(again)], {})
    basis.facts["decisions"] = again
    if rate is None and changes.failures is None:
        return basis
    losses = losses_in(facts)
    drawn = rate or losses.rate(parse_duration(repair, "--repair") if repair else None)
    if drawn is None:
        raise SpecError(
            f"`--failures`: no node failed in the {seconds(losses.service_s)} of node time that are recorded",
            hint="give a failure rate: --mtbf 60d",
        )
    recorded = msgspec.to_builtins(losses)
    basis.facts["failures"] = {"mtbf_s": drawn.mtbf_s, "repair_s": drawn.repair_s, "recorded": recorded}
    basis.lines.append(_failures_text(drawn, losses, is_learned=rate is None))
    workload = without_losses(past.workload)
    return basis._replace(scenario=msgspec.structs.replace(basis.scenario, workload=workload, failures=drawn))


def _failures_text(drawn: NodeFailureModel, losses: RecordedFailures, *, is_learned: bool) -> str:
    from shoal.sim.compare import seconds

    recorded = f"{losses.num_failures} recorded in {seconds(losses.service_s)} of node time"
    text = (
        f"failures: drawn, a node fails every {seconds(drawn.mtbf_s)} and is down {seconds(drawn.repair_s)}"
    )
    return f"{text}; {'learned from' if is_learned else 'instead of'} the {recorded}"


def _replay_text(again: dict[str, int]) -> str:
    text = f"replayed: {again['equal']} of {again['made']} recorded decisions come out equal"
    if again["given_up"]:
        text += f"; {again['given_up']} jobs cancelled before they ran are left out"
    if again["open"]:
        text += f"; {again['open']} run or wait now and are assumed to run as long as expected"
    return text


def _with_checkpoints(scenario: Scenario, checkpoints: CheckpointModel) -> Scenario:
    import msgspec

    return msgspec.structs.replace(scenario, checkpoints=checkpoints)


def _print(reports: list[SimulationReport]) -> None:
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
    """Check that the plot can be drawn before the simulation, which may take minutes."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise SpecError(
            "`--plot` needs matplotlib, which is not installed", hint="pip install 'shoal[plots]'"
        )
    from shoal.sim.plot import check_path

    check_path(path)


def _draw(outcomes: dict[str, SimulationOutcome], path: Path, title: str) -> None:
    from shoal.sim.plot import draw

    draw(outcomes, path, title)
    note(f"drawn: {path}")
