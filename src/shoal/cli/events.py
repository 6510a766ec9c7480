"""`shoal events` and `shoal audit`: what happened, and who did it."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated, Any

from cyclopts import Parameter

from shoal.cli.flags import JsonFlag, connect, one_job
from shoal.cli.show import print_json, print_json_line, screen_columns
from shoal.cli.text import one_line, shorten

After = Annotated[int | None, Parameter(help="From this number on; the newest if not given.")]
Limit = Annotated[int, Parameter(name=["--limit", "-n"], help="At most this many (50; up to 1000).")]


def events(
    *,
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], negative="", help="Go on as they come.")
    ] = False,
    after: After = None,
    limit: Limit = 50,
    project: Annotated[str | None, Parameter(name=["--project", "-p"], help="Only this project.")] = None,
    job: Annotated[str | None, Parameter(help="Only this job.")] = None,
    node: Annotated[str | None, Parameter(help="Only this node.")] = None,
    kind: Annotated[
        str | None, Parameter(help="Only kinds that start so, e.g. `job.` or `node.draining`.")
    ] = None,
    json: JsonFlag = False,
) -> int:
    """Print what happened, in order, each event with its number."""
    with connect() as shoal:
        if follow:
            for event in shoal.follow_events(after=after):
                print_json_line(event) if json else print(line(event), flush=True)
            return 0
        job_id = one_job(shoal, job) if job else None
        read = partial(shoal.events, project=project, job=job_id, node=node, kind=kind)
        found = read(after=after, limit=limit) if after is not None else read(tail=limit)
    _print(found, json=json)
    return 0


def audit(
    *,
    verify: Annotated[bool, Parameter(negative="", help="Check the chain of hashes instead.")] = False,
    after: After = None,
    limit: Limit = 50,
    json: JsonFlag = False,
) -> int:
    """Print who changed what. `--verify` recomputes the chain and exits 1 where it is broken."""
    with connect() as shoal:
        if verify:
            return _print_verdict(shoal.verify_audit(), json=json)
        found = shoal.audit(after=after, limit=limit) if after is not None else shoal.audit(tail=limit)
    _print(found, json=json)
    return 0


def line(event: dict[str, Any]) -> str:
    """`SEQ TIME KIND ACTOR SUBJECT DETAILS` in one line that fits the screen; `--json` has the whole ids."""
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(event["at"]))
    job = f"job..{event['job_id'][-6:]}" if event.get("job_id") else None
    subject = " ".join(part for part in (event.get("project"), job, event.get("node")) if part)
    data = event.get("data") or {}
    details = " ".join(f"{key}={value}" for key, value in data.items() if not isinstance(value, dict | list))
    parts = [event["seq"], when, event["kind"], event.get("actor") or "", subject, details]
    return shorten("  ".join(cell for part in parts if (cell := one_line(part))), screen_columns())


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
    else:
        print(f"broken at entry {verdict.get('first_bad')}: {one_line(verdict.get('because') or '')}")
    return 0 if is_intact else 1
