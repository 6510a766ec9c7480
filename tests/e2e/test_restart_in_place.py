"""Ranks that fail are started anew where they are, forked from a process that has made their imports."""

from __future__ import annotations

import os
import signal

import pytest

from shoal.wire import MAX_EARLY, EndKind, LogRule, Order, RuleAction
from tests.support.shares import RunningShare, Start, an_order, processes_with, until

PROGRAM = """
import json, os, sys, time
import wave
began = time.monotonic()
print("begin", os.environ["SHOAL_GENERATION"], os.environ["MASTER_PORT"], os.getpid(), flush=True)
print("zygote" if "shoal_warm.zygote" in sys.modules else "cold", sys.argv[1:], __name__, flush=True)
while time.monotonic() - began < float(sys.argv[1]):
    time.sleep(0.02)
if os.environ["SHOAL_GENERATION"] == "0" and os.environ["RANK"] == "1":
    HOW
time.sleep(1)
print("end", os.environ["RANK"], flush=True)
"""


def order(how: str, lived_s: float = 5.5, **changes: object) -> Order:
    text = PROGRAM.replace("HOW", how)
    values: dict[str, object] = {
        "setup": f"cat > train.py <<'END'\n{text}\nEND",
        "run": f"python train.py {lived_s}",
        "ranks_per_node": 2,
        "max_restarts": 2,
    }
    return an_order(**{**values, **changes})


def begins(share: RunningShare) -> list[list[str]]:
    return [text.split() for text in share.texts() if text.startswith("begin")]


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), 9)", "raise ValueError('bad batch')"])
def test_rank_that_fails_is_followed_by_a_new_group_in_the_same_place(start: Start, how: str) -> None:
    share = start(order(how))
    outcome = share.run()
    assert (outcome.kind, outcome.restarts) == (EndKind.SUCCEEDED, 1), share.describe()
    told = begins(share)
    assert [words[1] for words in told] == ["0", "0", "1", "1"]
    assert len({words[2] for words in told}) == 2, "each group meets at a port of its own"
    assert sorted(text for text in share.texts() if text.startswith("end")) == ["end 0", "end 1"]
    assert share.texts().count("zygote ['5.5'] __main__") == 4


def test_program_that_gives_up_at_once_is_left_to_its_retries(start: Start) -> None:
    outcome = start(order("os._exit(7)", lived_s=0.1)).run()
    assert (outcome.kind, outcome.exit_code, outcome.rank, outcome.restarts) == (EndKind.EXITED, 7, 1, 0)


def test_program_that_keeps_being_killed_at_once_is_soon_given_up_here(start: Start) -> None:
    always = "python -c 'import os; os.kill(os.getpid(), 9)'"
    outcome = start(order("", run=always, ranks_per_node=1, max_restarts=9)).run()
    assert (outcome.kind, outcome.signal, outcome.restarts) == (EndKind.SIGNALED, 9, MAX_EARLY)


def test_failure_of_a_forked_rank_reads_as_that_of_a_started_one(start: Start) -> None:
    share = start(order("raise ValueError('bad batch')", lived_s=0.1))
    share.run()
    told = share.texts("e")
    assert "ValueError: bad batch" in told
    assert not any("shoal_warm" in line for line in told)


def test_stop_reaches_a_forked_rank_in_time_to_save(start: Start) -> None:
    saved = "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))"
    text = f"import os, signal, sys, time\n{saved}\nprint('up', flush=True)\ntime.sleep(60)\n"
    share = start(order("", setup=f"cat > train.py <<'END'\n{text}\nEND", run="python train.py"))
    process = share.spawn()
    until(lambda: share.texts().count("up") == 2, describe=share.describe)
    process.send_signal(signal.SIGTERM)
    assert share.outcome().kind is EndKind.STOPPED
    assert share.texts().count("saved") == 2


def test_zygote_that_is_killed_takes_its_ranks_with_it_and_the_next_ones_start_cold(start: Start) -> None:
    share = start(order("pass", lived_s=3.0))
    share.spawn()
    until(lambda: len(begins(share)) == 2, describe=share.describe)
    (zygote,) = processes_with(f"zygote.main('{share.share.stand_ins}")
    os.kill(zygote, signal.SIGKILL)
    outcome = share.outcome(60)
    assert (outcome.kind, outcome.restarts) == (EndKind.SUCCEEDED, 1), share.describe()
    assert [text.split()[0] for text in share.texts() if "__main__" in text] == ["zygote"] * 2 + ["cold"] * 2


def test_launcher_in_front_of_a_program_starts_no_ranks_of_its_own(start: Start) -> None:
    share = start(order("pass", run="torchrun --standalone --nproc-per-node 2 train.py 0.1", max_restarts=0))
    assert share.run().kind is EndKind.SUCCEEDED, share.describe()
    assert len(begins(share)) == 2


def test_launcher_that_wants_other_ranks_than_the_job_has_says_what_to_write(start: Start) -> None:
    share = start(order("pass", run="torchrun --nproc-per-node 4 train.py 0.1"))
    assert share.run().exit_code == 2
    assert any("set `ranks_per_node: 4` in the job" in line for line in share.texts("e"))


def test_rank_that_a_log_rule_spoke_about_is_not_started_again_here(start: Start) -> None:
    rules = (LogRule(match="ECC error", action=RuleAction.EXCLUDE_NODE),)
    how = "print('ECC error', flush=True), os.kill(os.getpid(), 9)"
    outcome = start(order(how, lived_s=0.5, log_rules=rules)).run()
    assert (outcome.restarts, outcome.rules_hit) == (0, (RuleAction.EXCLUDE_NODE,))


def test_rank_that_names_a_broken_gpu_is_not_started_on_it_again(start: Start) -> None:
    how = "raise RuntimeError('CUDA error: uncorrectable ECC error encountered')"
    outcome = start(order(how, lived_s=5.5, gpu_ids=(0,))).run()
    assert (outcome.restarts, outcome.rules_hit) == (0, (RuleAction.EXCLUDE_NODE,))
    assert "uncorrectable ECC error" in outcome.message


def test_rank_without_gpu_memory_has_run_out_of_memory_and_is_not_started_again(start: Start) -> None:
    how = """
    class OutOfMemoryError(RuntimeError): __module__ = "torch"
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")"""
    outcome = start(order(how, lived_s=5.5)).run()
    assert (outcome.kind, outcome.restarts, outcome.rank) == (EndKind.OUT_OF_MEMORY, 0, 1)
    assert outcome.message.startswith("rank 1 ran out of GPU memory (rank 1 exited with code 1)")
