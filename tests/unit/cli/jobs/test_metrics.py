"""`shoal metrics`: a table with curves, a plot with axes, and JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shoal.cli.jobs.metrics import _print, draw_plot, number_text, sparkline
from tests.support.fakes.api_server import FakeApiServer, Shell

JOB_ID = f"job_{17:026d}"
PATH = f"/v1/jobs/{JOB_ID}/metrics"


def point(x: int, value: float | None) -> list[Any]:
    return [x, value, value, value]


def metrics_reply(status: str = "succeeded", *items: dict[str, Any]) -> dict[str, Any]:
    return {"ref": "vision/17", "name": "train", "status": status, "items": list(items)}


def metric(name: str = "loss", **changes: Any) -> dict[str, Any]:
    points = changes.pop("points", [point(step, 4.0 - step) for step in range(4)])
    values = {"name": name, "node": None, "axis": "step", "rank": 0, "heard_at": 5.0, "low": 1.0, "high": 4.0}
    return {**values, "newest": points[-1][:2], "points": points, **changes}


def test_metrics_are_listed_with_their_curve(shell: Shell, fake: FakeApiServer) -> None:
    seen = [point(1_700_000_000_000, 4096.0)]
    memory = metric("memory_bytes", node="n1", axis="time", rank=None, low=2048.0, high=4096.0, points=seen)
    fake.answers["GET", PATH] = metrics_reply(
        "running", memory, metric(), metric("odd", points=[point(1, None)], low=None)
    )
    lines = shell("metrics", JOB_ID).out.splitlines()
    assert lines[0] == "vision/17 train: running"
    assert lines[2].split() == ["loss", "-", "step", "3", "1", "1", "4", lines[2].split()[-1]]
    assert lines[2].split()[-1] in ("█▆▃▁", "%*=_")
    assert lines[3].split()[:7] == ["odd", "-", "step", "1", "not", "finite", "not"]
    assert lines[4].split()[:7] == ["memory_bytes", "n1", "11-14", "22:13:20Z", "4", "KiB", "2"]


def test_plot_has_axes_and_the_curve(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["GET", PATH] = metrics_reply("running", metric())
    lines = shell("metrics", JOB_ID, "--plot", "loss").out.splitlines()
    assert lines[2] == "loss, last 1"
    assert lines[3].endswith("4 |*")
    assert lines[-3].startswith(" ") or "|" in lines[-3]
    assert lines[-3].rstrip().endswith("*")
    assert lines[-1].split() == ["step", "0", "step", "3"]


def test_unknown_metric_is_refused_with_a_hint(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["GET", PATH] = metrics_reply("running")
    result = shell("metrics", JOB_ID, "--plot", "los")
    assert result.code == 2
    assert "vision/17 has no metric `los`" in result.err
    assert "`shoal metrics vision/17` lists those it has" in result.err


def test_missing_metrics_print_a_note(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["GET", PATH] = metrics_reply("running")
    assert "nothing measured yet" in shell("metrics", JOB_ID).err


def test_followed_metrics_end_with_the_job(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["GET", PATH] = metrics_reply("succeeded", metric())
    assert shell("metrics", JOB_ID, "--follow").out == "vision/17 succeeded  step 3 loss=1\n"
    line = shell("metrics", JOB_ID, "--follow", "--json").out
    assert json.loads(line)["items"][0]["name"] == "loss"


def test_metrics_of_the_program_come_first_and_a_pipe_cuts_none(
    shell: Shell, fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS")
    names = ("checkpoint_s", "communication_s", "compute_s", "input_s", "loss", "step_s", "steps_per_s")
    fake.answers["GET", PATH] = metrics_reply("succeeded", *map(metric, names))
    line = shell("metrics", JOB_ID, "--follow").out
    assert line.startswith("vision/17 succeeded  step 3 loss=1 checkpoint_s=1 ")
    assert line.endswith(" steps_per_s=1\n")
    assert shell("metrics", JOB_ID).out.splitlines()[2].startswith("loss ")


def test_narrow_screen_drops_extremes_and_keeps_the_newest_value(
    shell: Shell, fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    points = [point(step, 4.0) for step in range(24)]
    fake.answers["GET", PATH] = metrics_reply(
        "running", metric("compute_and_communication_s", points=points), metric()
    )
    head, first, second = shell("metrics", JOB_ID).out.splitlines()[1:]
    assert head.split() == ["NAME", "AT", "LAST"]
    assert first.split() == ["loss", "step", "3", "1"]
    assert second.split()[0] == "compute_and_communication_s"


def test_newest_value_is_the_latest_report_not_the_highest_step(shell: Shell, fake: FakeApiServer) -> None:
    again = metric(newest=[1, 3.5], heard_at=9.0)
    fake.answers["GET", PATH] = metrics_reply("failed", again, metric("quiet"))
    assert shell("metrics", JOB_ID, "--follow").out == "vision/17 failed  step 1 loss=3.5 quiet=1\n"
    assert " step 1  3.5 " in shell("metrics", JOB_ID, "loss").out


def test_older_server_without_newest_points_is_understood(shell: Shell, fake: FakeApiServer) -> None:
    before = metric()
    del before["newest"]
    fake.answers["GET", PATH] = metrics_reply("succeeded", before)
    assert shell("metrics", JOB_ID, "--follow").out == "vision/17 succeeded  step 3 loss=1\n"
    assert " step 3  1 " in shell("metrics", JOB_ID).out
    assert "loss, last 1" in shell("metrics", JOB_ID, "--plot", "loss").out


def test_drawing_that_is_followed_needs_a_terminal(shell: Shell) -> None:
    result = shell("metrics", JOB_ID, "--follow", "--plot", "loss")
    assert result.code == 2
    assert "standard output is not a terminal" in result.err
    assert "leave out `--plot` for a line each time" in result.err


def test_redrawn_screen_keeps_its_first_rows(capsys: pytest.CaptureFixture[str]) -> None:
    _print(metrics_reply("running", *(metric(f"m{at}") for at in range(9))), None, most=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["m0", "m1", "and"]
    assert lines[-1] == "and 7 more: `shoal metrics vision/17` lists them"


def test_hostile_names_reach_no_terminal(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["GET", PATH] = metrics_reply("running", metric("\x1b[2Jloss"))
    assert "\x1b" not in shell("metrics", JOB_ID).out


def test_sparkline_has_the_last_value_and_fits() -> None:
    assert sparkline([point(step, float(step)) for step in range(100)], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([point(0, 3.0), point(1, 3.0), point(2, None)], 8) == "▁▁x"
    assert sparkline([point(0, None)], 8) == "x"


def test_flat_single_point_or_nonfinite_curves_can_be_drawn() -> None:
    assert any("*" in line for line in draw_plot([point(5, 0.0)], "step", columns=40, rows=5))
    assert any("*" in line for line in draw_plot([point(0, 2.0), point(9, 2.0)], "step", columns=40, rows=5))
    assert draw_plot([point(0, None)], "step", columns=40, rows=5) == ["no finite value"]


@pytest.mark.parametrize(
    ("value", "text"), [(0.012345678, "0.01235"), (12345.0, "12.35k"), (3e15, "3000T"), (None, "not finite")]
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number_text(value) == text
