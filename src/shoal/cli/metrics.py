"""`shoal metrics`: what a job logs and its nodes measure, as curves in the terminal."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

from cyclopts import Parameter

from shoal.cli.curves import BLOCKS, PLAIN, drawn, figure, moment, sparkline
from shoal.cli.flags import JobRef, JsonFlag, connect, one_job
from shoal.cli.show import fitted, note, print_json, print_json_line, print_table, screen_columns
from shoal.cli.text import one_line
from shoal.client.handles import ENDED
from shoal.errors import SpecError

POLL_S = 2.0
SPARK_COLUMNS = 24
PLOT_ROWS = 14
HEAD_ROWS = 4
"""Of a screen: the job, the heads, what was left out, and the cursor."""
MAX_POINTS = 512
MEASURED = frozenset(
    f"{name}_s"
    for name in (
        "steps_per", "step", "input", "checkpoint", "communication", "compute", "compute_and_communication"
    )
)  # fmt: skip
"""What `runtime` measures of ranks without a word of the program's: the program's own names come first."""
SPARE = ("MIN", "MAX", "NODE", "CURVE")
"""Columns that a narrow screen does without, the first of them first."""


def metrics(
    job: JobRef,
    *names: Annotated[str, Parameter(help="Only these.")],
    plot: Annotated[str | None, Parameter(name="--plot", help="Draw this one with its axes.")] = None,
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], negative="", help="Until the job ends.")
    ] = False,
    json: JsonFlag = False,
) -> int:
    """Show what a job logs with `runtime.log` and what its nodes measure, each with its curve.

    A step that was made again after a restart shows its later value.
    """
    if plot is not None and follow and not json and not sys.stdout.isatty():
        raise SpecError(
            "`--plot` with `--follow` draws anew in one place, and standard output is no terminal",
            hint="leave out `--plot` for a line each time, or `--follow` for one drawing",
        )
    wanted = (plot,) if plot is not None else names
    with connect() as shoal:
        job_id = one_job(shoal, job)
        points = MAX_POINTS if plot is not None or json else SPARK_COLUMNS

        def ask() -> dict[str, Any]:
            return shoal.metrics(job_id, names=wanted, points=points)

        told = ask()
        _check(told, wanted, is_followed=follow)
        if not follow:
            print_json(told) if json else _print(told, plot)
            return 0
        try:
            for changed in _changes(ask, told):
                print_json_line(changed) if json else _redraw(changed, plot)
        except KeyboardInterrupt:
            return 130
    return 0


def _changes(ask: Any, told: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What is new each time something is, until the job has ended."""
    yield told
    while told["status"] not in ENDED:
        time.sleep(POLL_S)
        before, told = told, ask()
        if told != before:
            yield told


def _redraw(told: dict[str, Any], name: str | None) -> None:
    """The same place on a terminal; in a pipe a line for each time."""
    if sys.stdout.isatty():
        print("\x1b[H\x1b[2J", end="")
        _print(told, name, most=shutil.get_terminal_size().lines - HEAD_ROWS)
    else:
        line = f"{one_line(told['ref'])} {told['status']}  {_newest(told)}"
        print(fitted(line), flush=True)


def _newest(told: dict[str, Any]) -> str:
    ours = [one for one in _in_order(told) if one["node"] is None]
    values = (f"{one_line(one['name'])}={figure(_last(one)[1])}" for one in ours)
    # What was heard of last says where training is, also after it went back to a checkpoint.
    stepped = max((one for one in ours if one["axis"] == "step"), key=_recency, default=None)
    return " ".join([*([f"step {_last(stepped)[0]}"] if stepped is not None else []), *values])


def _recency(one: dict[str, Any]) -> tuple[float, int]:
    return one["heard_at"], _last(one)[0]


def _last(one: dict[str, Any]) -> tuple[int, float | None]:
    """Where and what was said last. A server of an earlier version knows only the end of the curve."""
    x, value = one.get("newest") or one["points"][-1][:2]
    return x, value


def _in_order(told: dict[str, Any]) -> list[dict[str, Any]]:
    """What the program logs, what is measured of its ranks, and what of nodes."""
    return sorted(
        told["items"],
        key=lambda one: (one["node"] is not None, one["name"] in MEASURED, one["axis"] != "step"),
    )


def _print(told: dict[str, Any], name: str | None, most: int | None = None) -> None:
    """A drawing, or a table of at most so many rows: a screen that is drawn anew keeps its first."""
    print(f"{one_line(told['ref'])} {one_line(told['name'])}: {told['status']}")
    if name is not None:
        for one in told["items"]:
            where = f" on {one_line(one['node'])}" if one["node"] else ""
            print(f"\n{one_line(one['name'])}{where}, last {figure(_last(one)[1])}")
            print("\n".join(drawn(one["points"], one["axis"], columns=screen_columns(), rows=PLOT_ROWS)))
        return
    heads = ("NAME", "NODE", "AT", "LAST", "MIN", "MAX", "CURVE")
    items = _in_order(told)
    shown = items if most is None else items[: max(most, 1)]
    print_table(heads, (_row(one) for one in shown), elastic="NAME", spare=SPARE)
    if len(shown) < len(items):
        print(f"and {len(items) - len(shown)} more: `shoal metrics {one_line(told['ref'])}` lists them")


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    x, value = _last(one)
    letters = BLOCKS if (sys.stdout.encoding or "").lower().startswith("utf") else PLAIN
    return (
        one["name"],
        one["node"] or "-",
        moment(x, one["axis"]),
        figure(value, one["name"]),
        figure(one["low"], one["name"]),
        figure(one["high"], one["name"]),
        sparkline(one["points"], SPARK_COLUMNS, letters=letters),
    )


def _check(told: dict[str, Any], wanted: tuple[str, ...], *, is_followed: bool) -> None:
    """Say what there is where nothing was found. `SpecError`: a name that nobody logs."""
    missing = [name for name in wanted if name not in {one["name"] for one in told["items"]}]
    if missing and not is_followed:
        ref = one_line(told["ref"])
        raise SpecError(
            f"{ref} has no metric `{one_line(missing[0])}`", hint=f"`shoal metrics {ref}` lists those it has"
        )
    if not told["items"]:
        note("-- nothing measured yet: `runtime.log(loss=..., step=...)` in the program, and a few seconds")
