"""`shoal reserve` and `shoal reservations`: nodes reserved for a project or for maintenance, for a while."""

from __future__ import annotations

import time
from math import ceil
from typing import Annotated, Any

from cyclopts import App, Parameter

from shoal.cli.flags import Because, JsonFlag, connect
from shoal.cli.output import note, print_folded, print_json, print_table
from shoal.cli.text import duration, one_line, utc
from shoal.errors import SpecError
from shoal.spec.quantity import parse_moment, parse_seconds

app = App(name="reservations", help="List reservations and maintenance windows; cancel one.")
NUM_NAMED = 3
MINUTES = "%Y-%m-%d %H:%M"


def reserve(
    *,
    nodes: Annotated[str | None, Parameter(help="Their names: `node-01,node-02`.")] = None,
    count: Annotated[
        int | None, Parameter(help="Or how many: those where the fewest jobs are disturbed.")
    ] = None,
    pool: Annotated[str | None, Parameter(help="The pool to take `--count` nodes from.")] = None,
    begins: Annotated[
        str, Parameter(name="--from", help="`14:00` UTC, `2026-11-16T08:00`, or in `2h`; by default now.")
    ] = "now",
    lasts: Annotated[str, Parameter(name="--for", help="How long: `2h`, `1h30m`, `2d`.")],
    project: Annotated[str | None, Parameter(help="Reserve for this project and those below it.")] = None,
    maintenance: Annotated[bool, Parameter(negative="", help="Maintenance: the nodes take no work.")] = False,
    because: Because = "",
    json: JsonFlag = False,
) -> int:
    """Reserve nodes for a project or for maintenance.

    A job that might still run when the reservation begins no longer starts there.
    """
    with connect() as shoal:
        window = shoal.windows.declare(
            "maintenance" if maintenance else "reservation",
            nodes=[name.strip() for name in nodes.split(",") if name.strip()] if nodes else None,
            count=count,
            pool=pool,
            from_at=None if begins == "now" else _read("from", begins),
            duration_s=_read("for", lasts),
            project=project,
            because=because,
        )
    if json:
        print_json(window)
        return 0
    print_folded(window_text(window))
    for ref in window["still_there"][:NUM_NAMED]:
        note(f"note: {one_line(ref)} may still run there by then; end it with `shoal stop {one_line(ref)}`")
    return 0


@app.default
def reservations(*, json: JsonFlag = False) -> int:
    """List reservations and maintenance windows that are not over."""
    with connect() as shoal:
        windows = shoal.windows.all()
    if json:
        print_json(windows)
    elif not windows:
        print("none; an operator makes one with `shoal reserve`")
    else:
        heads = ("ID", "FROM (UTC)", "FOR", "WHOM", "NODES")
        print_table(heads, (row(window) for window in windows), elastic="NODES", wraps=True)
    return 0


@app.command
def cancel(
    reservation: Annotated[str, Parameter(help="The id, as `shoal reservations` lists it.")],
    *,
    json: JsonFlag = False,
) -> int:
    """Cancel a reservation: the nodes take any work again."""
    with connect() as shoal:
        gone = shoal.windows.cancel(reservation)
    if json:
        print_json(gone)
    else:
        print_folded(f"cancelled: {window_text(gone)}")
    return 0


def window_text(window: dict[str, Any]) -> str:
    for_whom = f"reserved for {window['project']}" if window.get("project") else "in maintenance"
    names = ", ".join(window["nodes"])
    until_at = ceil(window["until_at"] / 60) * 60  # rounded up, as `shoal why` prints it
    return one_line(
        f"{window['id']}: {names} {for_whom} from {utc(window['from_at'], MINUTES)} "
        f"until {utc(until_at, MINUTES)} UTC"
    )


def row(window: dict[str, Any]) -> tuple[str, ...]:
    names = window["nodes"]
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    because = f" ({window['because']})" if window.get("because") else ""
    whom = "nobody" if window["kind"] == "maintenance" else window.get("project") or "others"
    return (
        window["id"],
        utc(window["from_at"], "%d %b %H:%M"),
        duration(window["until_at"] - window["from_at"]),
        whom,
        ", ".join(names[:NUM_NAMED]) + more + because,
    )


def _read(flag: str, text: str) -> float:
    try:
        return parse_moment(text, time.time()) if flag == "from" else parse_seconds(text)
    except ValueError as wrong:
        raise SpecError(f"`--{flag}`: {wrong}", hint="see `shoal reserve --help`") from None
