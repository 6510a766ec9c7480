"""Ranks that failed start again in place, forked from a process that has made their imports."""

from __future__ import annotations

import os
import signal

import pytest

from shoal.wire import MAX_EARLY_ENDS, EndKind, LogRule, RuleAction, TaskSpec
from tests.support.runtime.tasks import RunningTask, StartTask, a_task_spec, pids_with, until

PROGRAM = """
import json, os, sys, time
import wave
began = time.monotonic()
print("begin", os.environ["SHOAL_RENDEZVOUS_ROUND"], os.environ["MASTER_PORT"], os.getpid(), flush=True)
print("zygote" if "shoal_warm.zygote" in sys.modules else "cold", sys.argv[1:], __name__, flush=True)
while time.monotonic() - began < float(sys.argv[1]):
    time.sleep(0.02)
if os.environ["SHOAL_RENDEZVOUS_ROUND"] == "0" and os.environ["RANK"] == "1":
    HOW
time.sleep(1)
print("end", os.environ["RANK"], flush=True)
"""


def task_spec(how: str, lived_s: float = 5.5, **changes: object) -> TaskSpec:
    text = PROGRAM.replace("HOW", how)
    values: dict[str, object] = {
        "setup": f"cat > train.py <<'END'\n{text}\nEND",
        "run": f"python train.py {lived_s}",
        "ranks_per_node": 2,
        "max_restarts": 2,
    }
    return a_task_spec(**{**values, **changes})


def begins(task: RunningTask) -> list[list[str]]:
    return [text.split() for text in task.texts() if text.startswith("begin")]


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), 9)", "raise ValueError('bad batch')"])
def test_failed_rank_is_followed_by_a_new_group_in_place(start: StartTask, how: str) -> None:
    task = start(task_spec(how))
    outcome = task.run()
    assert (outcome.kind, outcome.restarts) == (EndKind.SUCCEEDED, 1), task.describe()
    starts = begins(task)
    assert [fields[1] for fields in starts] == ["0", "0", "1", "1"]
    assert len({fields[2] for fields in starts}) == 2, "each group has a port of its own"
    assert sorted(text for text in task.texts() if text.startswith("end")) == ["end 0", "end 1"]
    assert task.texts().count("zygote ['5.5'] __main__") == 4


def test_program_that_exits_at_once_is_not_restarted_in_place(start: StartTask) -> None:
    outcome = start(task_spec("os._exit(7)", lived_s=0.1)).run()
    assert (outcome.kind, outcome.exit_code, outcome.rank, outcome.restarts) == (EndKind.EXITED, 7, 1, 0)


def test_program_that_is_always_killed_at_once_is_soon_given_up(start: StartTask) -> None:
    always = "python -c 'import os; os.kill(os.getpid(), 9)'"
    outcome = start(task_spec("", run=always, ranks_per_node=1, max_restarts=9)).run()
    assert (outcome.kind, outcome.signal, outcome.restarts) == (EndKind.SIGNALED, 9, MAX_EARLY_ENDS)


def test_failure_of_a_forked_rank_has_the_same_message(start: StartTask) -> None:
    task = start(task_spec("raise ValueError('bad batch')", lived_s=0.1))
    task.run()
    errors = task.texts("e")
    assert "ValueError: bad batch" in errors
    assert not any("shoal_warm" in line for line in errors)


def test_stop_reaches_a_forked_rank_in_time_to_save(start: StartTask) -> None:
    saved = "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))"
    text = f"import os, signal, sys, time\n{saved}\nprint('up', flush=True)\ntime.sleep(60)\n"
    task = start(task_spec("", setup=f"cat > train.py <<'END'\n{text}\nEND", run="python train.py"))
    process = task.spawn()
    until(lambda: task.texts().count("up") == 2, describe=task.describe)
    process.send_signal(signal.SIGTERM)
    assert task.outcome().kind is EndKind.STOPPED
    assert task.texts().count("saved") == 2


def test_zygote_that_is_killed_takes_its_ranks_with_it_and_the_next_ones_start_cold(start: StartTask) -> None:
    task = start(task_spec("pass", lived_s=3.0))
    task.spawn()
    until(lambda: len(begins(task)) == 2, describe=task.describe)
    (zygote,) = pids_with(f"zygote.main('{task.task.stand_ins}")
    os.kill(zygote, signal.SIGKILL)
    outcome = task.outcome(60)
    assert (outcome.kind, outcome.restarts) == (EndKind.SUCCEEDED, 1), task.describe()
    assert [text.split()[0] for text in task.texts() if "__main__" in text] == ["zygote"] * 2 + ["cold"] * 2


def test_launcher_before_a_program_starts_no_ranks_of_its_own(start: StartTask) -> None:
    task = start(
        task_spec("pass", run="torchrun --standalone --nproc-per-node 2 train.py 0.1", max_restarts=0)
    )
    assert task.run().kind is EndKind.SUCCEEDED, task.describe()
    assert len(begins(task)) == 2


def test_launcher_with_a_wrong_number_of_ranks_says_what_to_write(start: StartTask) -> None:
    task = start(task_spec("pass", run="torchrun --nproc-per-node 4 train.py 0.1"))
    assert task.run().exit_code == 2
    assert any("set `ranks_per_node: 4` in the job" in line for line in task.texts("e"))


def test_rank_excluded_by_a_log_rule_is_not_started_again_in_place(start: StartTask) -> None:
    rules = (LogRule(match="ECC error", action=RuleAction.EXCLUDE_NODE),)
    how = "print('ECC error', flush=True), os.kill(os.getpid(), 9)"
    outcome = start(task_spec(how, lived_s=0.5, log_rules=rules)).run()
    assert (outcome.restarts, outcome.rules_hit) == (0, (RuleAction.EXCLUDE_NODE,))


def test_rank_that_reports_a_broken_gpu_is_not_started_on_it_again(start: StartTask) -> None:
    how = "raise RuntimeError('CUDA error: uncorrectable ECC error encountered')"
    outcome = start(task_spec(how, lived_s=5.5, gpu_ids=(0,))).run()
    assert (outcome.restarts, outcome.rules_hit) == (0, (RuleAction.EXCLUDE_NODE,))
    assert "uncorrectable ECC error" in outcome.message


def test_rank_that_ran_out_of_gpu_memory_is_not_started_again(start: StartTask) -> None:
    how = """
    class OutOfMemoryError(RuntimeError): __module__ = "torch"
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")"""
    outcome = start(task_spec(how, lived_s=5.5)).run()
    assert (outcome.kind, outcome.restarts, outcome.rank) == (EndKind.OUT_OF_MEMORY, 0, 1)
    assert outcome.message.startswith("rank 1 ran out of GPU memory (rank 1 exited with code 1)")
