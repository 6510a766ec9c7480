"""Draw outcomes beside each other: the queue and the devices in use over time, and how long projects waited.

Needs matplotlib, which `pip install 'shoal[plots]'` brings. No other part of the simulator needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from shoal.errors import SpecError
from shoal.sim.workload import SimulationOutcome

ENDINGS = (".png", ".svg")
NUM_POINTS = 500
MAX_PROJECTS = 6
"""The most curves that an eye can tell apart, for the projects that hold most."""
UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
NUM_SHOWN = 3
"""A time axis uses the largest unit of which it shows at least this many."""
BEYOND = 1.3
"""The axis of waits ends at this factor times the longest wait, so that the last step is visible."""
COLOURS = ("#1f77b4", "#d9822b", "#2e8b57", "#b5457a", "#6b5bb5", "#7a6a4f")
BEFORE, AFTER = "#8a8a8a", "#0b5cad"
TICKS = {
    1: "1 s",
    10: "10 s",
    60: "1 m",
    600: "10 m",
    3600: "1 h",
    21600: "6 h",
    86400: "1 d",
    604800: "7 d",
}

Floats = NDArray[np.float64]


def check_path(path: Path) -> None:
    """`SpecError` if no plot can be written there."""
    if path.suffix.lower() not in ENDINGS:
        raise SpecError(
            f"`{path.name}`: a plot is a .png or a .svg, not `{path.suffix}`", hint=f"--plot {path.stem}.png"
        )
    if path.is_dir() or not path.parent.is_dir():
        problem = "is a directory" if path.is_dir() else f"there is no directory `{path.parent}`"
        raise SpecError(f"`--plot {path}`: {problem}", hint=f"--plot {path.name}")


def draw(outcomes: Mapping[str, SimulationOutcome], path: Path, title: str) -> None:
    """Write the picture of one or two outcomes, by name, as PNG or SVG. The same outcomes give the same
    bytes.
    """
    check_path(path)
    with mpl.rc_context({"svg.hashsalt": "shoal", "font.size": 9}):
        figure = Figure(figsize=(9, 9), layout="constrained")
        queue, use, waits = figure.subplots(3, 1)
        figure.suptitle(title)
        styles = _styles(list(outcomes))
        unit_s, unit = _unit(outcomes)
        for name, outcome in outcomes.items():
            _over_time(queue, use, name, outcome, styles[name], unit_s)
        _waits(waits, outcomes, styles)
        _dress(queue, use, next(iter(outcomes.values())), unit)
        metadata: dict[str, Any] = {"Date": None} if path.suffix.lower() == ".svg" else {"Software": None}
        figure.savefig(path, dpi=120, metadata=metadata)


def _styles(names: list[str]) -> dict[str, dict[str, Any]]:
    """The last outcome is solid and in colour. The one it is compared with is thin and grey."""
    last = {"color": AFTER, "linewidth": 1.4, "linestyle": "-"}
    first = {"color": BEFORE, "linewidth": 1.0, "linestyle": "--"}
    return {name: last if name == names[-1] else first for name in names}


def _unit(outcomes: Mapping[str, SimulationOutcome]) -> tuple[float, str]:
    span_s = max(outcome.timeline.at[-1] - outcome.timeline.at[0] for outcome in outcomes.values())
    return next((unit for unit in UNITS if span_s >= NUM_SHOWN * unit[0]), UNITS[-1])


def _over_time(
    queue: Axes, use: Axes, name: str, outcome: SimulationOutcome, style: dict[str, Any], unit_s: float
) -> None:
    line = outcome.timeline
    at = np.array(line.at)
    middles, queued = _means(at, np.array(line.queued))
    _, used = _means(at, np.array(line.used))
    passed = middles / unit_s
    queue.plot(passed, queued, label=name, **style)
    use.plot(passed, used, label=name, **style)
    use.axhline(outcome.workload.capacity, color=style["color"], linewidth=0.6, linestyle=":")


def _means(at: Floats, values: Floats) -> tuple[Floats, Floats]:
    """The mean of a step function in each of `NUM_POINTS` slices, and the middles of the slices
    in seconds.
    """
    edges = np.linspace(at[0], at[-1], NUM_POINTS + 1)
    area = np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(at))])
    upto = np.interp(edges, at, area)
    width = max(edges[1] - edges[0], 1e-9)
    return (edges[:-1] + edges[1:]) / 2 - at[0], np.diff(upto) / width


def _waits(axes: Axes, outcomes: Mapping[str, SimulationOutcome], styles: dict[str, dict[str, Any]]) -> None:
    """Draw the part of each project's jobs that had waited no longer than each time."""
    projects = _largest(list(outcomes.values())[-1])
    colours = dict(zip(projects, COLOURS, strict=False))
    all_waits = {name: _waited(outcome) for name, outcome in outcomes.items()}
    longest_s = max(float(np.nanmax(waits, initial=0.0)) for waits in all_waits.values())
    least_s = 1.0 if longest_s >= 60 else 0.1
    highest = max(longest_s * BEYOND, 60 * least_s)
    for name, outcome in outcomes.items():
        waits = all_waits[name]
        of_project = np.array([job.project for job in outcome.workload.jobs])
        for project in projects:
            chosen = waits[(of_project == project) & ~np.isnan(waits)]
            if len(chosen):
                style = {**styles[name], "color": colours[project]}
                label = project if style["linestyle"] == "-" else None
                axes.step(*steps(chosen, least_s, highest), where="post", label=label, **style)
    axes.set_xscale("log")
    shown = [at for at in TICKS if least_s < at <= highest]
    axes.set_xticks([least_s, *shown], ["none", *(TICKS[at] for at in shown)])
    axes.minorticks_off()
    axes.set_xlim(least_s, highest)
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("waited no longer than")
    axes.set_ylabel("share of jobs")
    axes.grid(visible=True, alpha=0.25)
    _legend(axes, None if len(outcomes) == 1 else "dashed: before")


def steps(waits: Floats, least_s: float, highest_s: float) -> tuple[Floats, Floats]:
    """The points of a step function: at each wait, the part of jobs that had waited no longer.

    It rises from 0 at `least_s`, which stands for every wait up to it, and stays at 1 to `highest_s`.
    """
    at, counts = np.unique(np.maximum(waits, least_s), return_counts=True)
    share = np.cumsum(counts) / len(waits)
    return np.concatenate([[least_s], at, [highest_s]]), np.concatenate([[0.0], share, [1.0]])


def _waited(outcome: SimulationOutcome) -> Floats:
    submitted = np.array([job.submitted_at for job in outcome.workload.jobs])
    waits: Floats = np.array(outcome.starts) - submitted
    return waits


def _largest(outcome: SimulationOutcome) -> list[str]:
    held: dict[str, float] = {}
    stays = outcome.holdings
    for job, devices, begin, end in zip(stays.job, stays.devices, stays.begin, stays.end, strict=True):
        project = outcome.workload.jobs[job].project
        held[project] = held.get(project, 0.0) + devices * (end - begin)
    return sorted(held, key=lambda name: (-held[name], name))[:MAX_PROJECTS]


def _dress(queue: Axes, use: Axes, outcome: SimulationOutcome, unit: str) -> None:
    queue.set_ylabel("jobs waiting")
    use.set_ylabel(f"{outcome.workload.device}s in use")
    use.set_xlabel(f"{unit} since the first submission")
    for axes in (queue, use):
        axes.set_ylim(bottom=0)
        axes.margins(x=0)
        axes.grid(visible=True, alpha=0.25)
        _legend(axes)


def _legend(axes: Axes, title: str | None = None) -> None:
    """Put the legend beside the picture, because no corner of it is empty on every cluster."""
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, title=title)
