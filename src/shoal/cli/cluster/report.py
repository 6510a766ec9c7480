"""What `shoal cluster` prints: progress, dry runs, and the result; for people and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.cli.text import one_line

if TYPE_CHECKING:
    from shoal.cluster.inventory import Inventory, InventoryHost
    from shoal.cluster.operations import ClusterReport
    from shoal.cluster.session import ClusterSession, StepOutcome
    from shoal.cluster.steps import Step


def progress_lines(outcome: StepOutcome) -> list[str]:
    """Return a line of progress for a step that changed something or failed, none for the others."""
    if outcome.state == "unchanged":
        return []
    if outcome.state == "under way":
        detail = f" ({one_line(outcome.detail)})" if outcome.detail else ""
        return [f"{one_line(outcome.label)}: ... {one_line(outcome.title)}{detail}"]
    if outcome.state == "failed" and _needs_decision(outcome):
        return []
    if outcome.state == "failed" and outcome.step is None:
        return [f"{one_line(outcome.label)}: REFUSED: {one_line(outcome.detail)}"]
    if outcome.state == "failed":
        return [f"{one_line(outcome.label)}: FAILED: {one_line(outcome.title)}: {one_line(outcome.detail)}"]
    return [f"{one_line(outcome.label)}: {one_line(outcome.title)}"]


def dry_run_lines(outcome: StepOutcome) -> list[str]:
    """Return what a step of a dry run would change: every command, and every file that is not secret."""
    lines = progress_lines(outcome)
    if outcome.state != "would change" or outcome.step is None:
        return lines
    lines += [f"    $ {line}" if i == 0 else f"      {line}" for i, line in enumerate(_command(outcome.step))]
    return lines + [f"    | {line}" for line in _content(outcome.step)]


def _command(step: Step) -> list[str]:
    return step.apply.splitlines()


def _content(step: Step) -> list[str]:
    if step.file is None:
        return []
    if step.file.is_secret:
        return [f"({len(step.file.content)} secret bytes)"]
    if step.file.is_binary:
        return [f"({len(step.file.content)} bytes of {step.file.path})"]
    return step.file.content.decode().splitlines()


def closing_lines(
    cluster: str, session: ClusterSession, report: ClusterReport | None, seconds: float, *, is_dry: bool
) -> list[str]:
    """Return the last lines: advice, remarks, which machines failed, and how much was changed."""
    lines: list[str] = []
    gone = report.gone if report else frozenset()
    if report is not None and report.has_new:
        lines += [f"firewall: {one_line(line)}" for line in report.advice]
    lines += [f"note: {one_line(line)}" for line in session.warnings]
    if report is not None and (session.num_changed or session.failed):
        lines += [f"note: {one_line(line)}" for line in report.remarks]
    for address, outcome in session.failed.items():
        if address in gone or report is None:
            continue
        at = f"{one_line(outcome.title)}: " if outcome.step and not _needs_decision(outcome) else ""
        word = "refused" if _needs_decision(outcome) else "failed"
        lines.append(f"{word}: {outcome.label}: {at}{one_line(outcome.detail)}")
        if outcome.hint:
            lines.append(f"  hint: {one_line(outcome.hint)}")
    num_machines = len({outcome.host for outcome in session.outcomes})
    machines, things = counted(num_machines, "machine"), counted(session.num_changed, "thing")
    failed = len(set(session.failed) - gone)
    where = f"on {machines} in {seconds:.0f} s"
    if report is None:
        changed = f"{things} changed before" if session.num_changed else "nothing was changed"
        lines.append(f"cluster {cluster}: stopped; {changed}")
    elif (
        failed
        and not session.num_changed
        and all(_needs_decision(session.failed[it]) for it in set(session.failed) - gone)
    ):
        lines.append(f"cluster {cluster}: stopped; nothing was changed")
    elif failed:
        rest = f", the other {num_machines - failed} succeeded" if num_machines > failed else ""
        lines.append(f"cluster {cluster}: {failed} of {machines} failed{rest}")
        lines.append(f"next  fix {'it' if failed == 1 else 'them'}, then run the same command again")
        if (out := _removal_command(cluster, session, report)) and not is_dry:
            lines.append(f"next  or leave {'it' if failed == 1 else 'those that never joined'} out: {out}")
    elif not session.num_changed:
        looked = counted(len(session.outcomes), "thing")
        changed = "nothing else to change" if gone else "nothing to change"
        lines.append(f"cluster {cluster}: {changed}; {looked} checked {where}")
    elif is_dry:
        # An upper bound: a package may bring what a later step would change.
        lines.append(f"cluster {cluster}: at most {things} would be changed on {machines}")
        lines.append("next  the same command without `--dry-run`")
    else:
        lines.append(f"cluster {cluster}: {things} changed {where}")
    return lines


def _needs_decision(outcome: StepOutcome) -> bool:
    """Whether a person must decide; there is nothing to repair."""
    return outcome.step is not None and outcome.step.needs_decision


def _removal_command(cluster: str, session: ClusterSession, report: ClusterReport) -> str:
    """Return the command that drops machines that failed and never joined, such as a mistyped one."""
    hosts = report.inventory.members if report.inventory else ()
    stuck = [host for host in hosts if host.address in session.failed and not host.hardware]
    if not stuck:
        return ""
        # A machine that refuses the login may be a member that Slurm knows, so it takes `--force`.
    force = " --force" if {host.address for host in stuck} & session.inaccessible else ""
    names = ",".join(host.label for host in stuck)
    return f"`shoal cluster remove {names} --cluster {cluster}{force}`"


def host_state(host: InventoryHost) -> str:
    if host.is_going:
        return "destroy did not finish"
    return "joined" if host.hardware else "left, not cleaned" if host.is_unclean else "not joined"


def unfinished_text(inventory: Inventory) -> str:
    """Say which command has not finished, and what to type; "" if all have."""
    create = f"`shoal cluster create --name {inventory.cluster}`"
    if any(host.is_going for host in inventory.hosts):
        again = f"`shoal cluster destroy --cluster {inventory.cluster} --yes`"
        return f"-- `destroy` did not finish: {again} continues it; {create} restores the cluster"
    if not any(host.hardware for host in inventory.hosts):
        return f"-- `create` has not finished: {create} continues it"
    return ""


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def as_json(
    cluster: str, session: ClusterSession, report: ClusterReport | None, *, is_dry: bool
) -> dict[str, Any]:
    after = report.inventory if report else None
    gone = report.gone if report else frozenset()
    return {
        "cluster": cluster,
        "dry_run": is_dry,
        "num_changed": session.num_changed,
        "failed": sorted(set(session.failed) - gone),
        "steps": [_step_json(outcome) for outcome in session.outcomes],
        "firewall": report.advice if report else [],
        "remarks": [*session.warnings, *(report.remarks if report else [])],
        "inventory": after.model_dump(mode="json") if after else None,
    }


def _step_json(outcome: StepOutcome) -> dict[str, Any]:
    result: dict[str, Any] = {
        "host": outcome.host,
        "name": outcome.label,
        "title": outcome.title,
        "state": str(outcome.state),
        "detail": outcome.detail,
        "hint": outcome.hint,
    }
    if outcome.state != "unchanged" and outcome.step is not None:
        result["command"] = outcome.step.apply
        result["runs_on"] = outcome.step.runs_on
        if (file := outcome.step.file) is not None:
            content = None if file.is_secret or file.is_binary else file.content.decode()
            result["file"] = {"path": file.path, "owner": file.owner, "mode": file.mode, "content": content}
    return result
