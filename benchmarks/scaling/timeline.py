"""What was recorded twice a second, in the terminal and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shoal.cli.jobs.metrics import sparkline

COLUMNS = 64
COLOURS = {"rps": "#1f77b4", "in_flight": "#2e8b57", "queued": "#b5457a"}


@dataclass(frozen=True)
class Moment:
    at: float
    """Seconds since the beginning."""
    rps: float
    in_flight: int
    """As the callers count it: in replicas, and held because there is no replica."""
    queued: int
    wanted: int
    ready: int


SERIES = {
    "rps": "requests a second",
    "in_flight": "requests under way",
    "queued": "of them held or waiting",
    "wanted": "replicas wanted",
    "ready": "replicas ready",
}


def lines(moments: Sequence[Moment]) -> list[str]:
    """One curve for each series, with its greatest value."""
    width = max(map(len, SERIES.values()))
    curves = []
    for name, label in SERIES.items():
        points = [(moment.at, value := float(getattr(moment, name)), value, value) for moment in moments]
        most = max(point[1] for point in points)
        curves.append(f"{label:{width}}  {sparkline(points, COLUMNS)}  up to {most:g}")
    return [*curves, f"{'':{width}}  0 s{moments[-1].at:>{COLUMNS - 5}.0f} s"]


def steps(moments: Sequence[Moment]) -> list[int]:
    """Return the numbers of wanted replicas, one after the other."""
    counts = [moments[0].wanted]
    for moment in moments:
        if moment.wanted != counts[-1]:
            counts.append(moment.wanted)
    return counts


def num_turns(counts: Sequence[int]) -> int:
    """Return how often the direction changed: once, if it goes up and down again."""
    ways = [after > before for before, after in pairwise(counts)]
    return sum(moment != other for moment, other in pairwise(ways))


def draw(moments: Sequence[Moment], path: Path) -> None:
    figure = Figure(figsize=(9, 6), layout="constrained")
    requests, replicas = figure.subplots(2, 1, sharex=True)
    figure.suptitle("A service scaled by load alone: 0, 1, up to 8, and 0 again")
    at = [moment.at for moment in moments]
    for name, colour in COLOURS.items():
        requests.plot(at, [getattr(moment, name) for moment in moments], color=colour, label=SERIES[name])
    replicas.step(
        at, [moment.wanted for moment in moments], where="post", color="#d9822b", label=SERIES["wanted"]
    )
    replicas.step(
        at, [moment.ready for moment in moments], where="post", color="#0b5cad", label=SERIES["ready"]
    )
    replicas.set_xlabel("seconds")
    for axes in (requests, replicas):
        _dress(axes)
    figure.savefig(path, dpi=120)


def _dress(axes: Axes) -> None:
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
