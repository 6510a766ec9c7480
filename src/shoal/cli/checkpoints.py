"""`shoal checkpoints`: what a job has saved, which one it would go on from, and how often it saves."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from shoal.cli.flags import JobRef, JsonFlag, connect, one_job
from shoal.cli.show import at_work, note, print_folded, print_json, print_table
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
    """List a job's checkpoints, the newest first. `next` marks the one it would go on from.

    With `--verify` it exits 1 where one is damaged.
    """
    with connect() as shoal:
        job_id = one_job(shoal, job)
        with at_work("reading and hashing") if verify else at_work(""):
            told = shoal.checkpoints(job_id, verify=verify)
    has_damage = any(one["state"] == "damaged" for one in told["items"])
    if json:
        print_json(told)
    else:
        _print(told, verify=verify)
    return DAMAGED if verify and has_damage else 0


def _print(told: dict[str, Any], *, verify: bool) -> None:
    print(f"{one_line(told['ref'])} {one_line(told['name'])}: {told['status']}")
    own = told.get("own", [])  # a server of an earlier version does not look for them
    if told["items"]:
        heads = ("STEP", "SAVED", "SIZE", "ATTEMPT", "GROUP", "STATE", "WHERE")
        print_table(heads, (_row(one) for one in told["items"]), elastic="WHERE", wraps=True)
        for one in told["items"]:
            if one["problem"]:
                print_folded(f"step {one['step']}: {one_line(one['problem'])}")
    elif not told["has_directory"]:
        note("-- it keeps none: `checkpoint: {}` in the job gives it a directory")
    elif not own and not told.get("is_own_cut"):
        is_over = told["status"] in ENDED
        note("-- nothing is saved here" if is_over else "-- nothing saved yet")
    if verify and any(one["state"] == "complete" for one in told["items"]):
        note(
            "-- those that are `complete` were not reached in time: type it again, or copy them and hash them"
        )
    if told["decision"] is not None:
        print_folded(f"saves: {pace(told['decision'])}")
    if own:
        _print_own(own, told.get("num_own", len(own)))
    if told.get("is_own_cut"):
        note("-- one look ends after 5,000 files or some seconds: the program may have saved more by itself")


def _print_own(own: list[dict[str, Any]], count: int) -> None:
    """What nobody can check: only the program knows whether it is whole."""
    rows = (
        (
            one_line(one["name"]),
            utc(one["saved_at"], "%m-%d %H:%M:%SZ") if one["saved_at"] else "-",
            size(one["size_bytes"]),
            "unverified",
        )
        for one in own
    )
    print_table(("THE PROGRAM'S OWN", "WRITTEN", "SIZE", "STATE"), rows, elastic="THE PROGRAM'S OWN")
    for one in own:
        if one.get("problem"):  # a server of an earlier version has none
            print_folded(f"{one_line(one['name'])}: {one_line(one['problem'])}")
    if count > len(own):
        note(f"-- the newest {len(own)} of {count}")


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    mark = ", next" if one["is_next"] else ""
    return (
        str(one["step"]),
        utc(one["saved_at"], "%m-%d %H:%M:%SZ"),
        size(one["size_bytes"]),
        str(one["epoch"]),
        str(one["generation"]),
        f"{one['state']}{mark}",
        ", ".join(one["places"]) or "-",
    )


def pace(made: dict[str, Any]) -> str:
    """How often and why, in a sentence."""
    steps = f"every {made['steps']} steps" if made["steps"] != 1 else "every step"
    about = f"{steps}, about {seconds(made['steps'] * made['step_s'])}"
    cost = made["cost_s"]
    costs = "" if cost is None else f"; one holds training up {seconds(cost)}"
    costs += f" and is written in {seconds(made['written_s'])}" if cost is not None else ""
    why = {
        "every": "as the program says",
        "interval": f"as the job says: each {seconds(made['interval_s'] or 0.0)}",
        "first": "until it is known what one costs",
        "cost": f"by that cost and a failure each {seconds(made['mtbf_s'] or 0.0)} (Young and Daly)",
    }
    return f"{about}{costs}; {why.get(made['reason'], one_line(made['reason']))}"


def seconds(amount: float) -> str:
    return duration(amount) if amount >= 10 else f"{amount:.3g} s"
