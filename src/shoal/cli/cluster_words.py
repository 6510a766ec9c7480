"""What `shoal cluster` prints: progress, dry runs, and how it ended; for people and for machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.cli.text import one_line

if TYPE_CHECKING:
    from shoal.cluster.inventory import Host, Inventory
    from shoal.cluster.operate import Report
    from shoal.cluster.run import Crew, Outcome
    from shoal.cluster.steps import Step


def told(outcome: Outcome) -> list[str]:
    """Progress: a line for what changed or failed, none for what was so already."""
    if outcome.state == "unchanged":
        return []
    if outcome.state == "under way":
        detail = f" ({one_line(outcome.detail)})" if outcome.detail else ""
        return [f"{one_line(outcome.label)}: ... {one_line(outcome.title)}{detail}"]
    if outcome.state == "failed" and _is_no(outcome):
        return []
    if outcome.state == "failed" and outcome.step is None:
        return [f"{one_line(outcome.label)}: REFUSED: {one_line(outcome.detail)}"]
    if outcome.state == "failed":
        return [f"{one_line(outcome.label)}: FAILED: {one_line(outcome.title)}: {one_line(outcome.detail)}"]
    return [f"{one_line(outcome.label)}: {one_line(outcome.title)}"]


def planned(outcome: Outcome) -> list[str]:
    """A dry run: what would change, with every command and every file that is not secret."""
    lines = told(outcome)
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


def closing(cluster: str, crew: Crew, report: Report | None, seconds: float, *, is_dry: bool) -> list[str]:
    """The last lines: advice, remarks, who failed, and how much was changed."""
    lines: list[str] = []
    gone = report.gone if report else frozenset()
    if report is not None and report.has_new:
        lines += [f"firewall: {one_line(line)}" for line in report.advice]
    lines += [f"note: {one_line(line)}" for line in crew.doubts]
    if report is not None and (crew.num_changed or crew.failed):
        lines += [f"note: {one_line(line)}" for line in report.remarks]
    for address, outcome in crew.failed.items():
        if address in gone or report is None:
            continue
        at = f"{one_line(outcome.title)}: " if outcome.step and not _is_no(outcome) else ""
        word = "refused" if _is_no(outcome) else "failed"
        lines.append(f"{word}: {outcome.label}: {at}{one_line(outcome.detail)}")
        if outcome.hint:
            lines.append(f"  hint: {one_line(outcome.hint)}")
    num_machines = len({outcome.host for outcome in crew.outcomes})
    machines, things = counted(num_machines, "machine"), counted(crew.num_changed, "thing")
    failed = len(set(crew.failed) - gone)
    where = f"on {machines} in {seconds:.0f} s"
    if report is None:
        changed = f"{things} changed before" if crew.num_changed else "nothing was changed"
        lines.append(f"cluster {cluster}: stopped; {changed}")
    elif failed and not crew.num_changed and all(_is_no(crew.failed[it]) for it in set(crew.failed) - gone):
        lines.append(f"cluster {cluster}: stopped; nothing was changed")
    elif failed:
        rest = f", the other {num_machines - failed} did well" if num_machines > failed else ""
        lines.append(f"cluster {cluster}: {failed} of {machines} failed{rest}")
        lines.append(f"next  mend {'it' if failed == 1 else 'them'}, then the same command again")
        if (out := _ways_out(cluster, crew, report)) and not is_dry:
            lines.append(f"next  or leave {'it' if failed == 1 else 'those that never joined'} out: {out}")
    elif not crew.num_changed:
        looked = counted(len(crew.outcomes), "thing")
        changed = "nothing else to change" if gone else "nothing to change"
        lines.append(f"cluster {cluster}: {changed}; {looked} looked at {where}")
    elif is_dry:
        # Each was looked at as it is now: what a package brings along needs no step of its own afterwards.
        lines.append(f"cluster {cluster}: at most {things} would be changed on {machines}")
        lines.append("next  the same command without `--dry-run`")
    else:
        lines.append(f"cluster {cluster}: {things} changed {where}")
    return lines


def _is_no(outcome: Outcome) -> bool:
    """Whether it is for somebody to decide, and nothing to mend."""
    return outcome.step is not None and outcome.step.is_asking


def _ways_out(cluster: str, crew: Crew, report: Report) -> str:
    """The command that drops those that failed and never joined: a mistyped one would fail for ever."""
    hosts = report.inventory.members if report.inventory else ()
    stuck = [host for host in hosts if host.address in crew.failed and not host.found]
    if not stuck:
        return ""
    # One that does not let us in may be a machine of ours: Slurm cannot tell, so it goes by force only.
    force = " --force" if {host.address for host in stuck} & crew.shut else ""
    names = ",".join(host.label for host in stuck)
    return f"`shoal cluster remove {names} --cluster {cluster}{force}`"


def state_of(host: Host) -> str:
    if host.is_going:
        return "destroy did not finish"
    return "joined" if host.found else "left, not cleaned" if host.is_unclean else "not joined"


def unfinished(inventory: Inventory) -> str:
    """Which command has not ended well, and what to type; nothing where all have."""
    create = f"`shoal cluster create --name {inventory.cluster}`"
    if any(host.is_going for host in inventory.hosts):
        again = f"`shoal cluster destroy --cluster {inventory.cluster} --yes`"
        return f"-- `destroy` did not finish: {again} goes on where it was; {create} makes it whole again"
    if not any(host.found for host in inventory.hosts):
        return f"-- `create` has not ended well yet: {create} goes on where it was"
    return ""


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def as_json(cluster: str, crew: Crew, report: Report | None, *, is_dry: bool) -> dict[str, Any]:
    after = report.inventory if report else None
    gone = report.gone if report else frozenset()
    return {
        "cluster": cluster,
        "dry_run": is_dry,
        "num_changed": crew.num_changed,
        "failed": sorted(set(crew.failed) - gone),
        "steps": [_step_json(outcome) for outcome in crew.outcomes],
        "firewall": report.advice if report else [],
        "remarks": [*crew.doubts, *(report.remarks if report else [])],
        "inventory": after.model_dump(mode="json") if after else None,
    }


def _step_json(outcome: Outcome) -> dict[str, Any]:
    found: dict[str, Any] = {
        "host": outcome.host,
        "name": outcome.label,
        "title": outcome.title,
        "state": str(outcome.state),
        "detail": outcome.detail,
        "hint": outcome.hint,
    }
    if outcome.state != "unchanged" and outcome.step is not None:
        found["command"] = outcome.step.apply
        found["runs_on"] = outcome.step.where
        if (file := outcome.step.file) is not None:
            content = None if file.is_secret or file.is_binary else file.content.decode()
            found["file"] = {"path": file.path, "owner": file.owner, "mode": file.mode, "content": content}
    return found
