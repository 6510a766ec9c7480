"""`shoal events` and `shoal audit`: what happened, and who did it."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from shoal.cli.event_words import subject, told
from shoal.cli.flags import JsonFlag, connect, one_job
from shoal.cli.show import fitted, note, print_json, print_json_line
from shoal.cli.text import one_line, utc
from shoal.client.connection import Connection
from shoal.errors import SpecError

After = Annotated[int | None, Parameter(help="From this number on; the newest if not given.")]
Limit = Annotated[int, Parameter(name=["--limit", "-n"], help="At most this many (50; up to 1000).")]


def events(
    job: Annotated[
        str | None, Parameter(help="Only this job, or this service with its replicas and tokens.")
    ] = None,
    *,
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], negative="", help="Go on as they come.")
    ] = False,
    after: After = None,
    limit: Limit = 50,
    project: Annotated[str | None, Parameter(name=["--project", "-p"], help="Only this project.")] = None,
    node: Annotated[str | None, Parameter(help="Only this node.")] = None,
    kind: Annotated[
        str | None, Parameter(help="Only kinds that start so, e.g. `job.` or `node.draining`.")
    ] = None,
    json: JsonFlag = False,
) -> int:
    """Print what happened, in order: each event's number, time, subject, and what and why in words.

    On a terminal a line is cut at its width; in a pipe it is whole, and `--json` has everything.
    """
    with connect() as shoal:
        wanted = {"project": project, "node": node, "kind": kind}
        wanted |= _meant(shoal, job, project) if job else {}
        if follow:
            for event in shoal.follow_events(after=after, **wanted):
                print_json_line(event) if json else print(line(event), flush=True)
            return 0
        tail = limit if after is None else None
        found = shoal.events(after=after, limit=limit, tail=tail, **wanted)
    _print(found, json=json)
    return 0


def _meant(shoal: Connection, about: str, project: str | None) -> dict[str, str | None]:
    """The service of that name if there is one, else the job."""
    if about.startswith("job_") or about.rpartition("/")[2].isdigit():
        return {"job": one_job(shoal, about)}
    if about.startswith("svc_"):
        found = [shoal.services.show(about)]
    else:
        found = [one for one in shoal.services.named(about) if project in (None, one["project"])]
    if not found:
        return {"job": one_job(shoal, about)}
    if len(found) > 1:
        names = ", ".join(f"`{one_line(one['ref'])}`" for one in found)
        raise SpecError(
            f"`{one_line(about)}` is a service in {len(found)} projects", hint=f"type one of {names}"
        )
    return {"project": str(found[0]["project"]), "service": str(found[0]["name"])}


def audit(
    *,
    verify: Annotated[bool, Parameter(negative="", help="Check the log, and people by it, instead.")] = False,
    after: After = None,
    limit: Limit = 50,
    json: JsonFlag = False,
) -> int:
    """Print who changed what. `--verify` recomputes the chain, makes users, roles,
    projects and tokens again from it, and exits 1 where something differs.
    """
    with connect() as shoal:
        if verify:
            return _print_verdict(shoal.verify_audit(), json=json)
        found = shoal.audit(after=after, limit=limit) if after is not None else shoal.audit(tail=limit)
    _print(found, json=json)
    return 0


def line(event: dict[str, Any]) -> str:
    """`NUMBER TIME SUBJECT WHAT: WHY` in a line that fits the screen; the time is UTC, as its `Z` says."""
    when = utc(event["at"], "%m-%d %H:%M:%SZ")
    return fitted(f"{event['seq']:>4} {when}  {subject(event):<10} {told(event)}")


def _print(found: list[dict[str, Any]], *, json: bool) -> None:
    if json:
        print_json(found)
    elif not found:
        print("no events")
    else:
        print("\n".join(line(event) for event in found))


def _print_verdict(verdict: dict[str, Any], *, json: bool) -> int:
    is_intact = bool(verdict["is_intact"])
    if json:
        print_json(verdict)
    elif is_intact:
        head = verdict.get("head") or {}
        print(f"intact: {head.get('seq')} entries, head {one_line(head.get('hash') or '')}")
    elif verdict.get("first_bad") is not None:
        print(f"broken at entry {verdict['first_bad']}: {one_line(verdict.get('because') or '')}")
        note("users, roles, projects and tokens were not compared: the log itself is not what was written")
    else:
        _print_differences(verdict)
    for anchor in verdict.get("anchors") or ():
        if not json and anchor.get("problem"):
            note(f"warning: {one_line(anchor['path'])}: {one_line(anchor['problem'])}")
    return 0 if is_intact else 1


def _print_differences(verdict: dict[str, Any]) -> None:
    """What was changed without an event."""
    found = verdict.get("differences") or []
    count = int(verdict.get("num_differences") or 0)
    if not count:
        print(f"not to be trusted: {one_line(verdict.get('because') or '')}")
        return
    what = "1 thing in the database differs" if count == 1 else f"{count} things in the database differ"
    print(f"the log is whole, but {what} from it:")
    for one in found:
        print(f"  {one_line(one['because'])}")
    if count > len(found):
        print(f"  and {count - len(found)} more")
