"""`shoal checkpoints`: what a job saved, which checkpoint it would continue from, and how often it saves."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from shoal.cli.flags import JobRef, JsonFlag, connect, resolve_job
from shoal.cli.output import at_work, note, print_folded, print_json, print_table
from shoal.cli.text import duration, one_line, size, utc
from shoal.client.handles import ENDED

DAMAGED = 1


def checkpoints(
    job: JobRef,
    *,
    verify: Annotated[
        bool, Parameter(negative="", help="Compare hashes too, for up to 20 s, the newest first.")
    ] = False,
    json: JsonFlag = False,
) -> int:
    """List a job's checkpoints, the newest first. `next` marks the one it would continue from.

    `--verify` exits 1 if a checkpoint is damaged.
    """
    with connect() as shoal:
        job_id = resolve_job(shoal, job)
        with at_work("reading and hashing") if verify else at_work(""):
            listing = shoal.checkpoints(job_id, verify=verify)
    has_damage = any(checkpoint["state"] == "damaged" for checkpoint in listing["items"])
    if json:
        print_json(listing)
    else:
        _print(listing, verify=verify)
    return DAMAGED if verify and has_damage else 0


def _print(listing: dict[str, Any], *, verify: bool) -> None:
    print(f"{one_line(listing['ref'])} {one_line(listing['name'])}: {listing['status']}")
    saves = listing.get("program_saves", [])  # a server of an earlier version does not list them
    if listing["items"]:
        heads = ("STEP", "SAVED", "SIZE", "ATTEMPT", "GROUP", "STATE", "WHERE")
        print_table(heads, (_row(checkpoint) for checkpoint in listing["items"]), elastic="WHERE", wraps=True)
        for checkpoint in listing["items"]:
            if checkpoint["problem"]:
                print_folded(f"step {checkpoint['step']}: {one_line(checkpoint['problem'])}")
    elif not listing["has_directory"]:
        note("-- the job has no checkpoint directory: `checkpoint: {}` in its file gives it one")
    elif not saves and not listing.get("has_more_program_saves"):
        is_over = listing["status"] in ENDED
        note("-- nothing was saved" if is_over else "-- nothing saved yet")
    if verify and any(checkpoint["state"] == "complete" for checkpoint in listing["items"]):
        note("-- those marked `complete` were not hashed in time: repeat the command, or hash copies of them")
    if listing["decision"] is not None:
        print_folded(f"saves: {pace_text(listing['decision'])}")
    if saves:
        _print_own(saves, listing.get("num_program_saves", len(saves)))
    if listing.get("has_more_program_saves"):
        note("-- the list ends after 5,000 files or some seconds: the program may have saved more by itself")


def _print_own(saves: list[dict[str, Any]], count: int) -> None:
    """Print what the program saved by itself. Only the program knows whether it is whole."""
    rows = (
        (
            one_line(save["name"]),
            utc(save["saved_at"], "%m-%d %H:%M:%SZ") if save["saved_at"] else "-",
            size(save["size_bytes"]),
            "unverified",
        )
        for save in saves
    )
    print_table(("THE PROGRAM'S OWN", "WRITTEN", "SIZE", "STATE"), rows, elastic="THE PROGRAM'S OWN")
    for save in saves:
        if save.get("problem"):  # a server of an earlier version sends none
            print_folded(f"{one_line(save['name'])}: {one_line(save['problem'])}")
    if count > len(saves):
        note(f"-- the newest {len(saves)} of {count}")


def _row(checkpoint: dict[str, Any]) -> tuple[str, ...]:
    mark = ", next" if checkpoint["is_next"] else ""
    return (
        str(checkpoint["step"]),
        utc(checkpoint["saved_at"], "%m-%d %H:%M:%SZ"),
        size(checkpoint["size_bytes"]),
        str(checkpoint["epoch"]),
        str(checkpoint["rendezvous_round"]),
        f"{checkpoint['state']}{mark}",
        ", ".join(checkpoint["places"]) or "-",
    )


def pace_text(decision: dict[str, Any]) -> str:
    """Say how often the job saves, and why that often."""
    steps = f"every {decision['steps']} steps" if decision["steps"] != 1 else "every step"
    about = f"{steps}, about {seconds(decision['steps'] * decision['step_s'])}"
    cost = decision["cost_s"]
    costs = "" if cost is None else f"; each blocks training for {seconds(cost)}"
    costs += f" and is written in {seconds(decision['written_s'])}" if cost is not None else ""
    why = {
        "every": "as the program sets it",
        "interval": f"as the job sets it: every {seconds(decision['interval_s'] or 0.0)}",
        "first": "until the cost of one is known",
        "cost": f"by that cost and a failure every {seconds(decision['mtbf_s'] or 0.0)} (Young and Daly)",
    }
    return f"{about}{costs}; {why.get(decision['reason'], one_line(decision['reason']))}"


def seconds(amount: float) -> str:
    return duration(amount) if amount >= 10 else f"{amount:.3g} s"
