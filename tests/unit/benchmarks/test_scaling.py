"""The timeline of a service that load has scaled."""

from __future__ import annotations

from pathlib import Path

from benchmarks.scaling.timeline import Moment, draw, lines, num_turns, steps


def moments(*wanted: int) -> list[Moment]:
    return [
        Moment(at=float(place), rps=10.0 * count, in_flight=count, queued=0, wanted=count, ready=count)
        for place, count in enumerate(wanted)
    ]


def test_replicas_that_go_up_and_down_again_change_direction_once() -> None:
    assert steps(moments(0, 0, 1, 1, 8, 8, 1, 0)) == [0, 1, 8, 1, 0]
    assert num_turns([0, 1, 8, 1, 0]) == 1


def test_flapping_shows_as_turns() -> None:
    assert num_turns([0, 1, 2, 1, 2, 1, 0]) == 3
    assert num_turns([0]) == 0


def test_timeline_is_told_in_letters_and_drawn(tmp_path: Path) -> None:
    seen = moments(0, 1, 8, 1, 0)
    told = lines(seen)
    assert told[0].startswith("requests a second")
    assert told[0].endswith("up to 80")
    draw(seen, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
