"""Every line of every rank is in the log when the outcome is written."""

from __future__ import annotations

from pathlib import Path

from shoal.wire import EndKind
from tests.support.runtime.tasks import RunningTask, a_task_spec, until


def run(home: Path, **changes: object) -> RunningTask:
    task = RunningTask(home, a_task_spec(cpus=2.0, **changes))
    try:
        outcome = task.run()
        assert outcome.kind is EndKind.SUCCEEDED, outcome
    finally:
        task.close()
    return task


def test_hundred_thousand_lines_of_four_ranks_arrive_whole_and_in_order(tmp_path: Path) -> None:
    task = run(tmp_path / "home", ranks_per_node=4, run='seq -f "$RANK line %.0f" 25000')
    seen: dict[str, list[str]] = {}
    for rank, stream, text in task.log():
        assert stream == "o"
        seen.setdefault(rank, []).append(text)
    expected = {str(rank): [f"{rank} line {number}" for number in range(1, 25001)] for rank in range(4)}
    assert seen == expected


def test_huge_line_is_split_and_loses_nothing(tmp_path: Path) -> None:
    task = run(tmp_path / "home", run="head -c 300000 /dev/zero | tr '\\0' x; echo; echo after")
    texts = task.texts()
    assert "".join(texts[:-1]) == "x" * 300_000
    assert texts[-1] == "after"
    assert max(map(len, texts)) == 65536


def test_last_line_without_a_newline_is_kept(tmp_path: Path) -> None:
    task = run(tmp_path / "home", run="printf 'no newline'; sleep 0.1; printf ' at the end'")
    assert task.texts() == ["no newline at the end"]


def test_raw_bytes_are_kept_as_they_are(tmp_path: Path) -> None:
    task = run(tmp_path / "home", run="printf '\\033[31mred\\377\\n'")
    assert b"\x1b[31mred\xff\n" in Path(task.task.log).read_bytes()


def test_lines_of_a_background_process_are_kept_up_to_the_end(tmp_path: Path) -> None:
    task = run(tmp_path / "home", run="(echo from below; sleep 300) & sleep 0.3; echo top")
    assert task.texts() == ["from below", "top"]


def test_python_output_and_a_progress_bar_are_logged_before_the_end(tmp_path: Path) -> None:
    script = "import sys, time; print('begun'); sys.stderr.write('\\r 50%|##'); time.sleep(600)"
    task_spec = a_task_spec(cpus=2.0, run=f'python3 -c "{script}"')
    task = RunningTask(tmp_path / "home", task_spec)
    try:
        task.spawn()
        until(lambda: task.texts() == ["begun"], 20.0, task.describe)
        until(lambda: task.texts("e") == ["\r 50%|##"], 20.0, task.describe)
    finally:
        task.close()
