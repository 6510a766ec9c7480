"""What was seen twice a second, in the terminal and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shoal.cli.curves import sparkline

COLUMNS = 64
COLOURS = {"rps": "#1f77b4", "in_flight": "#2e8b57", "queued": "#b5457a"}


@dataclass(frozen=True)
class Moment:
    at: float
    """Seconds since the beginning."""
    rps: float
    in_flight: int
    """As the callers count it: in replicas, and held for want of one."""
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
    found = []
    for name, words in SERIES.items():
        points = [(one.at, value := float(getattr(one, name)), value, value) for one in moments]
        most = max(point[1] for point in points)
        found.append(f"{words:{width}}  {sparkline(points, COLUMNS)}  up to {most:g}")
    return [*found, f"{'':{width}}  0 s{moments[-1].at:>{COLUMNS - 5}.0f} s"]


def steps(moments: Sequence[Moment]) -> list[int]:
    """How many replicas were wanted, one after the other."""
    found = [moments[0].wanted]
    for one in moments:
        if one.wanted != found[-1]:
            found.append(one.wanted)
    return found


def num_turns(counts: Sequence[int]) -> int:
    """How often it went the other way: once, if it goes up and down again."""
    ways = [after > before for before, after in pairwise(counts)]
    return sum(one != other for one, other in pairwise(ways))


def draw(moments: Sequence[Moment], path: Path) -> None:
    figure = Figure(figsize=(9, 6), layout="constrained")
    requests, replicas = figure.subplots(2, 1, sharex=True)
    figure.suptitle("A service scaled by load alone: 0, 1, up to 8, and 0 again")
    at = [one.at for one in moments]
    for name, colour in COLOURS.items():
        requests.plot(at, [getattr(one, name) for one in moments], color=colour, label=SERIES[name])
    replicas.step(at, [one.wanted for one in moments], where="post", color="#d9822b", label=SERIES["wanted"])
    replicas.step(at, [one.ready for one in moments], where="post", color="#0b5cad", label=SERIES["ready"])
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
