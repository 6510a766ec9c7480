"""`shoal events` and `shoal audit`: what happened, and who did it."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from shoal.cli.event_text import describe_event, subject
from shoal.cli.flags import JsonFlag, connect, resolve_job
from shoal.cli.output import fitted, note, print_json, print_json_line
from shoal.cli.text import one_line, utc
from shoal.client.connection import Connection
from shoal.errors import SpecError

After = Annotated[int | None, Parameter(help="Start at this number; by default the newest are printed.")]
Limit = Annotated[int, Parameter(name=["--limit", "-n"], help="At most this many (50; up to 1000).")]


def events(
    job: Annotated[
        str | None, Parameter(help="Only this job, or this service with its replicas and tokens.")
    ] = None,
    *,
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], negative="", help="Print new events as they come.")
    ] = False,
    after: After = None,
    limit: Limit = 50,
    project: Annotated[str | None, Parameter(name=["--project", "-p"], help="Only this project.")] = None,
    node: Annotated[str | None, Parameter(help="Only this node.")] = None,
    kind: Annotated[
        str | None, Parameter(help="Only kinds with this prefix, e.g. `job.` or `node.draining`.")
    ] = None,
    json: JsonFlag = False,
) -> int:
    """Print what happened, in order: each event's number, time, subject, what happened and why.

    On a terminal a line is cut at its width. In a pipe it is whole, and `--json` has everything.
    """
    with connect() as shoal:
        wanted = {"project": project, "node": node, "kind": kind}
        wanted |= _event_filter(shoal, job, project) if job else {}
        if follow:
            for event in shoal.follow_events(after=after, **wanted):
                print_json_line(event) if json else print(event_line(event), flush=True)
            return 0
        tail = limit if after is None else None
        entries = shoal.events(after=after, limit=limit, tail=tail, **wanted)
    _print(entries, json=json)
    return 0


def _event_filter(shoal: Connection, about: str, project: str | None) -> dict[str, str | None]:
    """Return the filter for the service of that name if there is one, else for the job."""
    if about.startswith("job_") or about.rpartition("/")[2].isdigit():
        return {"job": resolve_job(shoal, about)}
    if about.startswith("svc_"):
        services = [shoal.services.show(about)]
    else:
        services = [
            service for service in shoal.services.find(about) if project in (None, service["project"])
        ]
    if not services:
        return {"job": resolve_job(shoal, about)}
    if len(services) > 1:
        names = ", ".join(f"`{one_line(service['ref'])}`" for service in services)
        raise SpecError(
            f"`{one_line(about)}` is a service in {len(services)} projects", hint=f"type one of {names}"
        )
    return {"project": str(services[0]["project"]), "service": str(services[0]["name"])}


def audit(
    *,
    verify: Annotated[
        bool, Parameter(negative="", help="Check the log, and compare the database with it, instead.")
    ] = False,
    after: After = None,
    limit: Limit = 50,
    json: JsonFlag = False,
) -> int:
    """Print who changed what. `--verify` recomputes the hash chain, rebuilds users, roles,
    projects and tokens from the log, and exits 1 if something differs.
    """
    with connect() as shoal:
        if verify:
            return _print_verdict(shoal.verify_audit(), json=json)
        entries = shoal.audit(after=after, limit=limit) if after is not None else shoal.audit(tail=limit)
    _print(entries, json=json)
    return 0


def event_line(event: dict[str, Any]) -> str:
    """Return `NUMBER TIME SUBJECT WHAT: WHY`, fitted to the screen. The time is UTC, as its `Z` says."""
    when = utc(event["at"], "%m-%d %H:%M:%SZ")
    return fitted(f"{event['seq']:>4} {when}  {subject(event):<10} {describe_event(event)}")


def _print(entries: list[dict[str, Any]], *, json: bool) -> None:
    if json:
        print_json(entries)
    elif not entries:
        print("no events")
    else:
        print("\n".join(event_line(event) for event in entries))


def _print_verdict(verdict: dict[str, Any], *, json: bool) -> int:
    is_intact = bool(verdict["is_intact"])
    if json:
        print_json(verdict)
    elif is_intact:
        head = verdict.get("head") or {}
        print(f"intact: {head.get('seq')} entries, head {one_line(head.get('hash') or '')}")
    elif verdict.get("first_bad") is not None:
        print(f"broken at entry {verdict['first_bad']}: {one_line(verdict.get('because') or '')}")
        note("users, roles, projects and tokens were not compared, because the log itself was changed")
    else:
        _print_differences(verdict)
    for anchor in verdict.get("anchors") or ():
        if not json and anchor.get("problem"):
            note(f"warning: {one_line(anchor['path'])}: {one_line(anchor['problem'])}")
    return 0 if is_intact else 1


def _print_differences(verdict: dict[str, Any]) -> None:
    """Print what was changed in the database without an event."""
    differences = verdict.get("differences") or []
    count = int(verdict.get("num_differences") or 0)
    if not count:
        print(f"not to be trusted: {one_line(verdict.get('because') or '')}")
        return
    subject_text = (
        "1 thing in the database differs" if count == 1 else f"{count} things in the database differ"
    )
    print(f"the log is whole, but {subject_text} from it:")
    for difference in differences:
        print(f"  {one_line(difference['because'])}")
    if count > len(differences):
        print(f"  and {count - len(differences)} more")
