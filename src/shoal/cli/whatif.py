"""`shoal whatif`: the past or a trace through the production scheduler, as it was and with a change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from shoal.cli.flags import JsonFlag, connect
from shoal.cli.show import at_work, note, print_folded, print_json, print_table
from shoal.cli.sim_flags import (
    CheckpointFlag,
    MtbfFlag,
    NodesFlag,
    PolicyFlag,
    RepairFlag,
    Trace,
    checkpoints_of,
    failures_of,
    times_of,
)
from shoal.errors import SpecError

if TYPE_CHECKING:
    from shoal.sim.checkpoints import Checkpoints
    from shoal.sim.failures import Failures
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
    str | None, Parameter(help="Nodes fail so many times as often as `--mtbf` says: `2x`.")
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
    repair: RepairFlag = "4h",
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
    before, again = (_of_trace(trace, nodes), None) if trace else _of_history()
    before = _with(before, failures_of(mtbf, repair), checkpoints_of(checkpoint))
    after, changes = _changed(before, add, remove, quota, policy, failures)
    scenarios = [before, after] if changes else [before]
    with at_work(f"simulating {len(before.workload.jobs):,} jobs"):
        outcomes = play_all(scenarios)
    reports = [report(outcome) for outcome in outcomes]
    names = ("before", "after")[: len(reports)]
    source = trace.name if trace else "the history of this cluster"
    told = f"{source}, {', '.join(changes) or 'nothing changed'}"
    if json:
        import msgspec

        found = {name: msgspec.to_builtins(one) for name, one in zip(names, reports, strict=True)}
        facts = {"is_simulated": True, "trace": str(trace) if trace else None, "changes": changes}
        print_json({**facts, **({"decisions": again} if again else {}), **found})
    else:
        if again:
            print_folded(_told_again(again))
        print(f"simulated: {told}")
        _print(reports)
    if plot:
        _draw(dict(zip(names, outcomes, strict=True)), plot, f"simulated: {told}")
    return 0


def _of_trace(trace: Path, nodes: str | None) -> Scenario:
    from shoal.sim.from_trace import read_workload
    from shoal.sim.machines import parse_shape
    from shoal.sim.scenario import Scenario

    return Scenario(workload=read_workload(trace, parse_shape(nodes, "--nodes") if nodes else None))


def _of_history() -> tuple[Scenario, dict[str, int]]:
    """The cluster's past, and how many of its decisions come out equal when they are made again."""
    from shoal.cli.decision import whole_log
    from shoal.sim.history.facts import facts_of
    from shoal.sim.history.replay import Replay
    from shoal.sim.history.workload import past_of
    from shoal.sim.scenario import Scenario

    with connect() as shoal:
        facts = list(facts_of(whole_log(shoal)))
    past = past_of(facts)
    if not past.workload.jobs:
        raise SpecError(
            "this cluster has run nothing yet: there is no past to change", hint="shoal whatif TRACE"
        )
    with at_work("making its decisions again"):
        equal = [verdict.is_equal for verdict in Replay().verdicts(facts)]
    again = {
        "made": len(equal),
        "equal": sum(equal),
        "given_up": past.num_given_up,
        "open": past.num_open,
    }
    return Scenario(workload=past.workload, policy=past.policy), again


def _told_again(again: dict[str, int]) -> str:
    told = f"made again: {again['equal']} of {again['made']} recorded decisions come out equal"
    if again["given_up"]:
        told += f"; {again['given_up']} jobs given up before they ran are left out"
    if again["open"]:
        told += f"; {again['open']} run or wait now and are taken to run as long as is expected"
    return told


def _with(scenario: Scenario, failures: Failures | None, checkpoints: Checkpoints) -> Scenario:
    import msgspec

    return msgspec.structs.replace(scenario, failures=failures, checkpoints=checkpoints)


def _changed(
    before: Scenario,
    add: tuple[str, ...],
    remove: tuple[str, ...],
    quota: tuple[str, ...],
    policy: Path | None,
    failures: str | None,
) -> tuple[Scenario, list[str]]:
    """The other scenario, and what is different about it in words."""
    import msgspec

    from shoal.control.policy_file import read_policy
    from shoal.sim.change import parse_quotas, with_nodes, with_quotas, without_nodes
    from shoal.sim.machines import parse_shape

    words = {"add": add, "remove": remove, "quota": quota}
    changes = [f"{word} {text}" for word, texts in words.items() for text in texts]
    workload = with_nodes(before.workload, [parse_shape(text, "--add") for text in add])
    workload = with_quotas(without_nodes(workload, remove), parse_quotas(quota))
    after = msgspec.structs.replace(before, workload=workload)
    if policy:
        changes.append(f"policy {policy.name}")
        after = msgspec.structs.replace(after, policy=read_policy(policy))
    if failures:
        if before.failures is None:
            raise SpecError(
                f"`--failures {failures}`: so many times as often as what? A trace records no failures",
                hint=f"--mtbf 60d --failures {failures}",
            )
        changes.append(f"failures {failures}")
        more = before.failures.more_often(times_of(failures, "--failures"))
        after = msgspec.structs.replace(after, failures=more)
    return after, changes


def _print(reports: list[Report]) -> None:
    from shoal.sim.compare import overall_rows, project_rows, single_rows

    if len(reports) == 1:
        print_table(("", "SIMULATED"), single_rows(reports[0]), elastic="")
        return
    print_table(("", "BEFORE", "AFTER", "CHANGE"), overall_rows(*reports), elastic="")
    if len(reports[0].projects) > 1:
        print()
        heads = ("PROJECT", "JOBS", "MEAN WAIT", "AFTER", "CHANGE", "P95 WAIT", "AFTER", "CHANGE")
        print_table(heads, project_rows(*reports), elastic="PROJECT")


def _can_draw(path: Path) -> None:
    """Asked first: a simulation may take minutes."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise SpecError(
            "`--plot` needs matplotlib, which is not installed", hint="pip install 'shoal[plots]'"
        )
    from shoal.sim.plot import check_ending

    check_ending(path)


def _draw(outcomes: dict[str, Outcome], path: Path, title: str) -> None:
    from shoal.sim.plot import draw

    draw(outcomes, path, title)
    note(f"drawn: {path}")
