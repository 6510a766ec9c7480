"""The yardsticks' own arithmetic: what counts as equal, and what is said when the traces are absent."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.yardsticks.__main__ import SECTIONS, main
from benchmarks.yardsticks.beat import Beat
from benchmarks.yardsticks.beat import report as beat_report
from benchmarks.yardsticks.gate import Gate, report
from benchmarks.yardsticks.section import find_traces


@pytest.mark.parametrize(
    "published, ours, shown, is_right",
    [
        ("86.40", 86.3977, "86.40", True),
        ("86.40", 86.41, "86.41", False),
        ("11585", 11585.29, "11585", True),
        ("14.8k", 14805.2, "14.8k", True),
        ("27k", 27_600.0, "28k", False),
    ],
)
def test_ours_is_printed_and_compared_as_published(
    published: str, ours: float, shown: str, is_right: bool
) -> None:
    gate = Gate("log", "policy", published, ours)
    assert (gate.shown, gate.is_right) == (shown, is_right)
    assert (gate.verdict == "equal") is is_right


def test_means_of_random_runs_may_differ_by_three_standard_errors() -> None:
    near = Gate("log", "policy", "95.39", 95.20, error=0.1)
    assert (near.is_right, near.verdict) == (True, "-0.19, 1.9 standard errors")
    assert not Gate("log", "policy", "95.39", 95.20, error=0.05).is_right


def test_a_report_counts_the_gates_that_hold() -> None:
    found = report("title", [Gate("a", "x", "1.0", 1.04), Gate("b", "x", "1.0", 2.0)])
    assert not found.is_right
    assert "1 of 2 as published" in found.text
    assert "differs by +1.00" in found.text


def test_absent_traces_are_a_sentence_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["yardsticks", "--trace", str(tmp_path / "none")])
    assert main() == 0
    assert f"there are none at {tmp_path / 'none'}" in capsys.readouterr().out


def test_a_section_whose_files_are_absent_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["yardsticks", "--trace", str(tmp_path), "--only", "windows"])
    assert main() == 0
    assert "skipped: Windows" in capsys.readouterr().out


def test_an_unknown_section_is_refused_with_the_known_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["yardsticks", "--only", "windoes"])
    with pytest.raises(SystemExit):
        main()
    assert all(section.name in capsys.readouterr().err for section in SECTIONS[:1])


def test_the_traces_are_named_by_option_then_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_TRACES", str(tmp_path))
    assert find_traces(None).root == tmp_path
    assert find_traces(Path("/elsewhere")).root == Path("/elsewhere")


def test_a_row_to_beat_says_by_how_much_it_is_met_or_missed() -> None:
    met = Beat("log", "mean", "EASY", 100.0, 80.0)
    missed = Beat("log", "worst", "EASY", 100.0, 130.0)
    bound = Beat("log", "mean", "an oracle", 10.0, 25.0, is_goal=False)
    verdicts = [row.verdict for row in (met, missed, bound)]
    assert verdicts == ["met, 20.0% below", "missed by 30.0%", "2.50x (no goal)"]
    found = beat_report("title", [met, missed, bound])
    assert found.is_right
    assert "1 of 2 rows met" in found.text
    assert "missed: log worst (EASY)" in found.text
