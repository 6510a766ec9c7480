"""Which of a process's lines say why it ended."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.runtime.process.output_tail import (
    MAX_OPEN,
    REMEMBERED_LENGTH,
    TRACE_BYTES,
    TRACE_LINES,
    OutputTail,
    tail_of_streams,
)

LEAKS = [b"nanobind: leaked 12 instances!"] + [b' - leaked function "f%d"' % n for n in range(40)]
ENDING = [
    *LEAKS,
    b"/usr/lib/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 3 leaked objects",
    b"  warnings.warn('resource_tracker: There appear'",
    b"[rank0]:[W1118 ProcessGroupGloo.cpp:75] Warning: destroy_process_group() was not called",
    b"[E1118 socket.cpp:1019] [c10d] Connection reset by peer",
    b"double free or corruption (!prev)",
    b"terminate called without an active exception",
]


def of_lines(*lines: bytes | list[bytes], at: float = 0.0) -> OutputTail:
    tail = OutputTail()
    flat = [line for item in lines for line in (item if isinstance(item, list) else [item])]
    tail.add(flat, at)
    return tail


def trace(error: bytes, place: bytes = b"train.py", prefix: bytes = b"") -> list[bytes]:
    body = [
        b"Traceback (most recent call last):",
        b'  File "%s", line 3, in main' % place,
        b"    load()",
        error,
    ]
    return [prefix + line for line in body]


def last(tail: OutputTail, now: float = 0.0) -> str:
    return tail.text(now).splitlines()[-1]


def test_last_lines_with_text_are_kept() -> None:
    tail = of_lines([b"line %d" % n for n in range(20)], b"", b"  ")
    assert tail.text(0.0).splitlines() == [f"line {n}" for n in range(15, 20)]


def test_progress_bar_is_kept_in_its_last_state() -> None:
    assert of_lines(b"\r 10%\r 20%\r").text(0.0) == " 20%"


def test_traceback_is_kept_and_a_long_one_is_cut_to_its_inner_end() -> None:
    frames = [b'  File "train.py", line %d, in f%d' % (n, n) for n in range(100)]
    tail = of_lines(b"warming up", b"Traceback (most recent call last):", frames, b"ValueError: bad batch")
    shown = tail.text(0.0).splitlines()
    assert shown[-2:] == ['  File "train.py", line 99, in f99', "ValueError: bad batch"]
    assert len(shown) <= TRACE_LINES
    assert len(tail.text(0.0)) <= TRACE_BYTES


@pytest.mark.parametrize("is_in_one_piece", [True, False])
def test_noise_at_the_end_does_not_hide_the_traceback(is_in_one_piece: bool) -> None:
    lines = [*trace(b"FileNotFoundError: ckpt.pt"), *ENDING]
    tail = OutputTail()
    for piece in [lines] if is_in_one_piece else [[line] for line in lines]:
        tail.add(piece, 0.0)
    assert tail.text(3.0).splitlines() == [
        "Traceback (most recent call last):",
        '  File "train.py", line 3, in main',
        "    load()",
        "FileNotFoundError: ckpt.pt",
    ]


def test_noise_is_kept_only_if_there_is_nothing_else() -> None:
    assert last(of_lines(LEAKS[:3])) == "nanobind: leaked 12 instances!"
    assert last(of_lines(b"cannot open shard 7", LEAKS)) == "cannot open shard 7"


def test_traceback_that_was_handled_long_ago_is_not_the_reason() -> None:
    tail = of_lines(trace(b"TimeoutError: first try"), [b"step %d" % n for n in range(100)])
    assert last(tail, now=5.0) == "TimeoutError: first try", "the process may have ended by it"
    assert last(tail, now=60.0) == "step 99"


def test_chained_exceptions_are_kept_in_order() -> None:
    between = b"During handling of the above exception, another exception occurred:"
    tail = of_lines(trace(b"KeyError: 'step'"), b"", between, b"", trace(b"RuntimeError: bad checkpoint"))
    assert tail.text(0.0).splitlines()[:3] == [
        "KeyError: 'step'",
        between.decode(),
        "Traceback (most recent call last):",
    ]
    assert last(tail) == "RuntimeError: bad checkpoint"


@pytest.mark.parametrize(
    "before", [b"Exception ignored in: <function Loader.__del__>", b"Exception in thread Thread-1 (f):"]
)
def test_ignored_exception_is_kept_only_if_there_is_no_other(before: bytes) -> None:
    aside = [before, *trace(b"AttributeError: _worker")]
    assert last(of_lines(trace(b"ValueError: bad"), aside)) == "ValueError: bad"
    assert last(of_lines(aside)) == "AttributeError: _worker"


def test_tracebacks_of_two_ranks_in_one_stream_are_separated() -> None:
    zero = trace(b"RuntimeError: Connection closed by peer", b"a.py", b"[rank0]: ")
    trace_of_rank = trace(b"ValueError: bad", b"b.py", b"[rank1]: ")
    mixed = [line for pair in zip(zero, trace_of_rank, strict=True) for line in pair]
    assert of_lines(mixed).text(0.0).splitlines() == [line[9:].decode() for line in trace_of_rank]


def test_lines_of_other_writers_within_a_traceback_are_left_out() -> None:
    first, *others = trace(b"zlib.error: Error -3")
    tail = of_lines(first, b"epoch 3, loss 0.1", others[:2], b"100%|####| 5/5", others[2:])
    assert tail.text(0.0).splitlines() == [line.decode() for line in (first, *others)]


def test_message_of_several_lines_is_kept_and_bounded() -> None:
    error = b"RuntimeError: Error(s) in loading state_dict for Net:"
    tail = of_lines(trace(error), [b"\tsize mismatch for layer %d" % n for n in range(50)])
    assert tail.text(0.0).splitlines()[4:6] == ["\tsize mismatch for layer 0", "\tsize mismatch for layer 1"]
    assert len(tail.text(0.0).splitlines()) < 12


def test_error_of_a_loader_worker_is_kept_with_its_own_place() -> None:
    inner = [
        b"Original Traceback (most recent call last):",
        b'  File "data.py", line 9, in item',
        b"OSError: shard",
    ]
    tail = of_lines(trace(b"RuntimeError: Caught OSError in DataLoader worker process 0."), inner)
    assert tail.text(0.0).splitlines()[-2:] == ['  File "data.py", line 9, in item', "OSError: shard"]


def test_boxed_traceback_is_kept_with_its_frames_and_its_error() -> None:
    box = [
        "╭─────────── Traceback (most recent call last) ───────────╮",
        "│ /home/ana/train.py:7 in main                            │",
        "│                                                         │",
        "│   6 def main():                                         │",
        "│ ❱ 7     trainer.fit(model, ckpt_path='last.ckpt')       │",
        "╰─────────────────────────────────────────────────────────╯",
        "FileNotFoundError: last.ckpt",
    ]
    tail = of_lines([line.encode() for line in box], ENDING)
    assert tail.text(0.0).splitlines() == [
        "Traceback (most recent call last):",
        "  /home/ana/train.py:7 in main",
        "  ❱ 7     trainer.fit(model, ckpt_path='last.ckpt')",
        "FileNotFoundError: last.ckpt",
    ]


def test_crash_of_the_interpreter_is_kept_with_its_innermost_frames() -> None:
    frames = [b'  File "a.py", line %d in f' % n for n in range(50)]
    tail = of_lines(
        b"Fatal Python error: Segmentation fault", b"", b"Thread 0x01 (most recent call first):", frames
    )
    shown = tail.text(0.0).splitlines()
    assert shown[:2] == ["Fatal Python error: Segmentation fault", '  File "a.py", line 0 in f']
    assert len(shown) <= 8


def test_colours_are_removed() -> None:
    assert last(of_lines(trace(b"\x1b[1;31mValueError\x1b[0m: bad"))) == "ValueError: bad"


def test_output_counts_if_errors_went_there() -> None:
    error, output = of_lines(b"tee: done"), of_lines(trace(b"ValueError: bad"))
    assert tail_of_streams(error, output, 0.0).endswith("ValueError: bad")
    assert tail_of_streams(of_lines(), of_lines(b"giving up"), 0.0) == "giving up"
    assert tail_of_streams(of_lines(b"giving up"), of_lines(b"step 3"), 0.0) == "giving up"


def test_failed_start_of_mpi_is_kept_while_its_launcher_writes_on() -> None:
    cause = b"[node:14] *** An error occurred in MPI_Init"
    noise = [b"[proxy:0:0@node] demux engine error %d" % n for n in range(10)]
    assert of_lines(cause, noise).text(0.0).splitlines()[0] == cause.decode()
    assert of_lines(cause, noise[:2]).text(0.0).count(cause.decode()) == 1
    assert cause.decode() not in of_lines(cause, noise * 3).text(0.0), "the program went on for long"


def test_groups_of_exceptions_and_chains_as_python_prints_them() -> None:
    program = """
def failed(error):
    try:
        raise error
    except Exception as raised:
        return raised
raise ExceptionGroup('two', [failed(OSError('a')), failed(ValueError('b'))])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert last(of_lines(done.stderr.splitlines(), ENDING)) == "ValueError: b"
    program = "try:\n    {}['a']\nexcept KeyError:\n    raise OSError('b')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert of_lines(done.stderr.splitlines(), ENDING).text(0.0).startswith("KeyError: 'a'\nDuring handling")


HOSTILE = st.sampled_from(
    [
        *trace(b"E: x"),
        *ENDING,
        b"[rank%d]: " % 3,
        b"  | ",
        b"\xff" * 40,
        b"\xe2\x95\xad Traceback (most recent call last) ",
    ]
)


@given(st.lists(st.lists(HOSTILE, max_size=6).map(b"".join), max_size=200))
def test_kept_text_is_bounded_for_any_output(lines: list[bytes]) -> None:
    tail = OutputTail()
    for line in lines:
        tail.add([line, b"[%d]: Traceback (most recent call last):" % (hash(line) % 99)], 0.0)
    assert len(tail._open) <= MAX_OPEN
    assert len(tail.text(0.0)) <= TRACE_BYTES + 5 * (REMEMBERED_LENGTH + 1)
