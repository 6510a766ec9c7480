"""`shoal reserve` and `shoal reservations`: nodes kept for one project, or for nobody, for a while."""

from __future__ import annotations

import time
from math import ceil
from typing import Annotated, Any

from cyclopts import App, Parameter

from shoal.cli.flags import Because, JsonFlag, connect
from shoal.cli.show import note, print_folded, print_json, print_table
from shoal.cli.text import duration, one_line, utc
from shoal.errors import SpecError
from shoal.spec.moments import parse_moment
from shoal.spec.quantity import parse_seconds

app = App(name="reservations", help="List reservations and maintenance windows; cancel one.")
NUM_NAMED = 3
MINUTES = "%Y-%m-%d %H:%M"


def reserve(
    *,
    nodes: Annotated[str | None, Parameter(help="Their names: `node-01,node-02`.")] = None,
    count: Annotated[int | None, Parameter(help="Or so many: those that disturb the fewest jobs.")] = None,
    pool: Annotated[str | None, Parameter(help="Of which pool so many are.")] = None,
    begins: Annotated[
        str, Parameter(name="--from", help="`14:00` UTC, `2026-11-16T08:00`, or in `2h`; now if not given.")
    ] = "now",
    lasts: Annotated[str, Parameter(name="--for", help="How long: `2h`, `1h30m`, `2d`.")],
    project: Annotated[str | None, Parameter(help="For whom: it and the projects below it.")] = None,
    maintenance: Annotated[bool, Parameter(negative="", help="For nobody: the nodes take no work.")] = False,
    because: Because = "",
    json: JsonFlag = False,
) -> int:
    """Keep nodes for a project or for maintenance: who may still run then does not start there any more."""
    with connect() as shoal:
        made = shoal.windows.declare(
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
        print_json(made)
        return 0
    print_folded(told(made))
    for ref in made["still_there"][:NUM_NAMED]:
        note(f"note: {one_line(ref)} may still run there then; end it with `shoal stop {one_line(ref)}`")
    return 0


@app.default
def reservations(*, json: JsonFlag = False) -> int:
    """List reservations and maintenance windows that are not over."""
    with connect() as shoal:
        found = shoal.windows.all()
    if json:
        print_json(found)
    elif not found:
        print("none; an operator makes one with `shoal reserve`")
    else:
        heads = ("ID", "FROM (UTC)", "FOR", "WHOM", "NODES")
        print_table(heads, (row(window) for window in found), elastic="NODES", wraps=True)
    return 0


@app.command
def cancel(
    reservation: Annotated[str, Parameter(help="Its id, as `shoal reservations` lists it.")],
    *,
    json: JsonFlag = False,
) -> int:
    """Give the nodes back to everybody."""
    with connect() as shoal:
        gone = shoal.windows.cancel(reservation)
    if json:
        print_json(gone)
    else:
        print_folded(f"cancelled: {told(gone)}")
    return 0


def told(window: dict[str, Any]) -> str:
    for_whom = f"reserved for {window['project']}" if window.get("project") else "in maintenance"
    names = ", ".join(window["nodes"])
    until_at = ceil(window["until_at"] / 60) * 60  # upwards, as `shoal why` tells it
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
