"""`shoal metrics`: what a job logs and its nodes measure, as curves in the terminal.

Curves are drawn with letters: one line high in a table, or with axes on the whole screen. The drawing
functions are pure.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from cyclopts import Parameter

from shoal.cli.flags import JobRef, JsonFlag, connect, resolve_job
from shoal.cli.output import fitted, note, print_json, print_json_line, print_table, screen_columns
from shoal.cli.text import one_line, size
from shoal.client.handles import ENDED
from shoal.errors import SpecError

POLL_S = 2.0
SPARK_COLUMNS = 24
PLOT_ROWS = 14
HEAD_ROWS = 4
"""Lines of a screen for the job, the heads, what was left out, and the cursor."""
MAX_POINTS = 512
MEASURED = frozenset(
    f"{name}_s"
    for name in (
        "steps_per", "step", "input", "checkpoint", "communication", "compute", "compute_and_communication"
    )
)  # fmt: skip
"""What `runtime` measures without the program's help. The program's own names are listed first."""
SPARE = ("MIN", "MAX", "NODE", "CURVE")
"""Columns that a narrow screen leaves out, in this order."""


def metrics(
    job: JobRef,
    *names: Annotated[str, Parameter(help="Only these metrics.")],
    plot: Annotated[str | None, Parameter(name="--plot", help="Draw this metric with its axes.")] = None,
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], negative="", help="Update until the job ends.")
    ] = False,
    json: JsonFlag = False,
) -> int:
    """Show what a job logs with `runtime.log` and what its nodes measure, each with its curve.

    A step that was repeated after a restart shows its later value.
    """
    if plot is not None and follow and not json and not sys.stdout.isatty():
        raise SpecError(
            "`--plot` with `--follow` redraws one screen, and standard output is not a terminal",
            hint="leave out `--plot` for a line each time, or `--follow` for one drawing",
        )
    wanted = (plot,) if plot is not None else names
    with connect() as shoal:
        job_id = resolve_job(shoal, job)
        points = MAX_POINTS if plot is not None or json else SPARK_COLUMNS

        def fetch() -> dict[str, Any]:
            return shoal.metrics(job_id, names=wanted, points=points)

        view = fetch()
        _check(view, wanted, is_followed=follow)
        if not follow:
            print_json(view) if json else _print(view, plot)
            return 0
        try:
            for changed in _changes(fetch, view):
                print_json_line(changed) if json else _redraw(changed, plot)
        except KeyboardInterrupt:
            return 130
    return 0


def _changes(fetch: Any, view: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the view each time it changes, until the job has ended."""
    yield view
    while view["status"] not in ENDED:
        time.sleep(POLL_S)
        before, view = view, fetch()
        if view != before:
            yield view


def _redraw(view: dict[str, Any], name: str | None) -> None:
    """Redraw the screen on a terminal; in a pipe print a line."""
    if sys.stdout.isatty():
        print("\x1b[H\x1b[2J", end="")
        _print(view, name, most=shutil.get_terminal_size().lines - HEAD_ROWS)
    else:
        line = f"{one_line(view['ref'])} {view['status']}  {_newest(view)}"
        print(fitted(line), flush=True)


def _newest(view: dict[str, Any]) -> str:
    ours = [series for series in _in_order(view) if series["node"] is None]
    values = (f"{one_line(series['name'])}={number_text(_last(series)[1])}" for series in ours)
    # The series heard from last tells where training is, also after it returned to a checkpoint.
    stepped = max((series for series in ours if series["axis"] == "step"), key=_recency, default=None)
    return " ".join([*([f"step {_last(stepped)[0]}"] if stepped is not None else []), *values])


def _recency(series: dict[str, Any]) -> tuple[float, int]:
    return series["heard_at"], _last(series)[0]


def _last(series: dict[str, Any]) -> tuple[int, float | None]:
    """Return the newest point. A server of an earlier version sends only the end of the curve."""
    x, value = series.get("newest") or series["points"][-1][:2]
    return x, value


def _in_order(view: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the program logs, then what is measured of its ranks, then what is measured of nodes."""
    return sorted(
        view["items"],
        key=lambda series: (series["node"] is not None, series["name"] in MEASURED, series["axis"] != "step"),
    )


def _print(view: dict[str, Any], name: str | None, most: int | None = None) -> None:
    """Print a plot, or a table of at most `most` rows, so that the top of a redrawn screen stays visible."""
    print(f"{one_line(view['ref'])} {one_line(view['name'])}: {view['status']}")
    if name is not None:
        for series in view["items"]:
            where = f" on {one_line(series['node'])}" if series["node"] else ""
            print(f"\n{one_line(series['name'])}{where}, last {number_text(_last(series)[1])}")
            print(
                "\n".join(
                    draw_plot(series["points"], series["axis"], columns=screen_columns(), rows=PLOT_ROWS)
                )
            )
        return
    heads = ("NAME", "NODE", "AT", "LAST", "MIN", "MAX", "CURVE")
    items = _in_order(view)
    shown = items if most is None else items[: max(most, 1)]
    print_table(heads, (_row(series) for series in shown), elastic="NAME", spare=SPARE)
    if len(shown) < len(items):
        print(f"and {len(items) - len(shown)} more: `shoal metrics {one_line(view['ref'])}` lists them")


def _row(series: dict[str, Any]) -> tuple[str, ...]:
    x, value = _last(series)
    letters = BLOCKS if (sys.stdout.encoding or "").lower().startswith("utf") else PLAIN
    return (
        series["name"],
        series["node"] or "-",
        axis_text(x, series["axis"]),
        number_text(value, series["name"]),
        number_text(series["low"], series["name"]),
        number_text(series["high"], series["name"]),
        sparkline(series["points"], SPARK_COLUMNS, letters=letters),
    )


def _check(view: dict[str, Any], wanted: tuple[str, ...], *, is_followed: bool) -> None:
    """Print how to log a metric if there is none. Raise `SpecError` for a name that the job does not log."""
    missing = [name for name in wanted if name not in {series["name"] for series in view["items"]}]
    if missing and not is_followed:
        ref = one_line(view["ref"])
        raise SpecError(
            f"{ref} has no metric `{one_line(missing[0])}`", hint=f"`shoal metrics {ref}` lists those it has"
        )
    if not view["items"]:
        note("-- nothing measured yet: `runtime.log(loss=..., step=...)` in the program, and a few seconds")


Point = Sequence[float | None]
"""`x`, last, low, high, as the API gives it."""
BLOCKS, PLAIN = "▁▂▃▄▅▆▇█", "_.-=+*#%"
NO_NUMBER = "x"
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def sparkline(points: Sequence[Point], columns: int, *, letters: str = BLOCKS) -> str:
    """Return the last values, one letter each, from left to right; `x` is a value that is not finite."""
    values = [point[1] for point in _sample(points, columns)]
    present = [value for value in values if value is not None]
    if not present:
        return NO_NUMBER * len(values)
    low, reach = min(present), max(present) - min(present)
    top = len(letters) - 1
    return "".join(
        NO_NUMBER if value is None else letters[round((value - low) / reach * top) if reach else 0]
        for value in values
    )


def draw_plot(points: Sequence[Point], axis: str, *, columns: int, rows: int) -> list[str]:
    """Return a curve over its axes: `*` is the value, `:` the range where neighbours were merged."""
    lows = [point[2] for point in points if point[2] is not None]
    highs = [point[3] for point in points if point[3] is not None]
    if not lows or not highs:
        return ["no finite value"]
    low, high = min(lows), max(highs)
    if low == high:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    labels = [number_text(high - (high - low) * row / (rows - 1)) for row in range(rows)]
    margin = max(map(len, labels))
    field = _field(points, low, high, columns=max(columns - margin - 3, 10), rows=rows)
    lines = [
        f"{label:>{margin}} |{''.join(line)}".rstrip() for label, line in zip(labels, field, strict=True)
    ]
    first, last = (axis_text(points[at][0] or 0, axis) for at in (0, -1))
    width = len(field[0])
    return [
        *lines,
        f"{'':>{margin}} +{'-' * width}",
        f"{'':>{margin}}  {first}{last:>{max(width - len(first), len(last) + 1)}}",
    ]


def _field(points: Sequence[Point], low: float, high: float, *, columns: int, rows: int) -> list[list[str]]:
    field = [[" "] * columns for _ in range(rows)]
    left, right = points[0][0] or 0, points[-1][0] or 0

    def row_of(value: float) -> int:
        return round((high - value) / (high - low) * (rows - 1))

    for x, last, least, most in points:
        column = round(((x or 0) - left) / (right - left) * (columns - 1)) if right > left else 0
        if least is not None and most is not None:
            for row in range(row_of(most), row_of(least) + 1):
                if field[row][column] == " ":
                    field[row][column] = ":"
        if last is not None:
            field[row_of(last)][column] = "*"
    return field


def _sample(points: Sequence[Point], columns: int) -> list[Point]:
    """Return at most `columns` points, evenly spaced, always with the last."""
    if len(points) <= columns:
        return list(points)
    each = len(points) / columns
    return [points[min(math.ceil((at + 1) * each), len(points)) - 1] for at in range(columns)]


def number_text(value: float | None, name: str = "") -> str:
    """Return a number in about seven letters; a name that ends in `_bytes` uses units of 1024."""
    if value is None:
        return "not finite"
    if name.endswith("_bytes"):
        return size(value)
    for amount, unit in UNITS:
        if abs(value) >= amount * 10:
            return f"{value / amount:.4g}{unit}"
    return f"{value:.4g}"


def axis_text(x: float, axis: str) -> str:
    """Return the position on the axis: `step 1200`, or the time of day in UTC."""
    return f"step {int(x)}" if axis == "step" else time.strftime("%m-%d %H:%M:%SZ", time.gmtime(x / 1000))
