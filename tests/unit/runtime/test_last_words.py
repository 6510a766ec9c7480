"""Which of a process's lines tell why it ended."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.runtime.last_words import MAX_OPEN, REMEMBERED_LENGTH, TRACE_BYTES, TRACE_LINES, LastWords, why

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


def of_lines(*lines: bytes | list[bytes], at: float = 0.0) -> LastWords:
    words = LastWords()
    flat = [line for one in lines for line in (one if isinstance(one, list) else [one])]
    words.add(flat, at)
    return words


def trace(error: bytes, place: bytes = b"train.py", prefix: bytes = b"") -> list[bytes]:
    body = [
        b"Traceback (most recent call last):",
        b'  File "%s", line 3, in main' % place,
        b"    load()",
        error,
    ]
    return [prefix + line for line in body]


def last(words: LastWords, now: float = 0.0) -> str:
    return words.text(now).splitlines()[-1]


def test_last_lines_that_say_something_are_kept() -> None:
    words = of_lines([b"line %d" % n for n in range(20)], b"", b"  ")
    assert words.text(0.0).splitlines() == [f"line {n}" for n in range(15, 20)]


def test_last_words_of_a_progress_bar_are_its_last_state() -> None:
    assert of_lines(b"\r 10%\r 20%\r").text(0.0) == " 20%"


def test_traceback_is_told_and_of_a_long_one_its_inner_end() -> None:
    frames = [b'  File "train.py", line %d, in f%d' % (n, n) for n in range(100)]
    words = of_lines(b"warming up", b"Traceback (most recent call last):", frames, b"ValueError: bad batch")
    said = words.text(0.0).splitlines()
    assert said[-2:] == ['  File "train.py", line 99, in f99', "ValueError: bad batch"]
    assert len(said) <= TRACE_LINES
    assert len(words.text(0.0)) <= TRACE_BYTES


@pytest.mark.parametrize("is_in_one_piece", [True, False])
def test_noise_at_the_end_does_not_hide_the_traceback(is_in_one_piece: bool) -> None:
    lines = [*trace(b"FileNotFoundError: ckpt.pt"), *ENDING]
    words = LastWords()
    for piece in [lines] if is_in_one_piece else [[line] for line in lines]:
        words.add(piece, 0.0)
    assert words.text(3.0).splitlines() == [
        "Traceback (most recent call last):",
        '  File "train.py", line 3, in main',
        "    load()",
        "FileNotFoundError: ckpt.pt",
    ]


def test_noise_alone_is_better_than_nothing_and_worse_than_anything_else() -> None:
    assert last(of_lines(LEAKS[:3])) == "nanobind: leaked 12 instances!"
    assert last(of_lines(b"cannot open shard 7", LEAKS)) == "cannot open shard 7"


def test_traceback_that_was_handled_long_ago_is_not_the_reason() -> None:
    words = of_lines(trace(b"TimeoutError: first try"), [b"step %d" % n for n in range(100)])
    assert last(words, now=5.0) == "TimeoutError: first try", "it may have ended by it"
    assert last(words, now=60.0) == "step 99"


def test_newest_of_chained_exceptions_is_told_after_what_it_came_from() -> None:
    between = b"During handling of the above exception, another exception occurred:"
    words = of_lines(trace(b"KeyError: 'step'"), b"", between, b"", trace(b"RuntimeError: bad checkpoint"))
    assert words.text(0.0).splitlines()[:3] == [
        "KeyError: 'step'",
        between.decode(),
        "Traceback (most recent call last):",
    ]
    assert last(words) == "RuntimeError: bad checkpoint"


@pytest.mark.parametrize(
    "before", [b"Exception ignored in: <function Loader.__del__>", b"Exception in thread Thread-1 (f):"]
)
def test_traceback_that_ends_no_program_is_told_only_where_there_is_no_other(before: bytes) -> None:
    aside = [before, *trace(b"AttributeError: _worker")]
    assert last(of_lines(trace(b"ValueError: bad"), aside)) == "ValueError: bad"
    assert last(of_lines(aside)) == "AttributeError: _worker"


def test_tracebacks_of_two_ranks_in_one_stream_are_told_apart() -> None:
    zero = trace(b"RuntimeError: Connection closed by peer", b"a.py", b"[rank0]: ")
    one = trace(b"ValueError: bad", b"b.py", b"[rank1]: ")
    mixed = [line for pair in zip(zero, one, strict=True) for line in pair]
    assert of_lines(mixed).text(0.0).splitlines() == [line[9:].decode() for line in one]


def test_lines_of_others_within_a_traceback_are_left_out() -> None:
    first, *others = trace(b"zlib.error: Error -3")
    words = of_lines(first, b"epoch 3, loss 0.1", others[:2], b"100%|####| 5/5", others[2:])
    assert words.text(0.0).splitlines() == [line.decode() for line in (first, *others)]


def test_message_of_several_lines_is_kept_and_bounded() -> None:
    error = b"RuntimeError: Error(s) in loading state_dict for Net:"
    words = of_lines(trace(error), [b"\tsize mismatch for layer %d" % n for n in range(50)])
    assert words.text(0.0).splitlines()[4:6] == ["\tsize mismatch for layer 0", "\tsize mismatch for layer 1"]
    assert len(words.text(0.0).splitlines()) < 12


def test_error_of_a_loader_worker_is_told_with_its_own_place() -> None:
    inner = [
        b"Original Traceback (most recent call last):",
        b'  File "data.py", line 9, in item',
        b"OSError: shard",
    ]
    words = of_lines(trace(b"RuntimeError: Caught OSError in DataLoader worker process 0."), inner)
    assert words.text(0.0).splitlines()[-2:] == ['  File "data.py", line 9, in item', "OSError: shard"]


def test_boxed_traceback_is_told_by_its_places_and_its_error() -> None:
    box = [
        "╭─────────── Traceback (most recent call last) ───────────╮",
        "│ /home/ana/train.py:7 in main                            │",
        "│                                                         │",
        "│   6 def main():                                         │",
        "│ ❱ 7     trainer.fit(model, ckpt_path='last.ckpt')       │",
        "╰─────────────────────────────────────────────────────────╯",
        "FileNotFoundError: last.ckpt",
    ]
    words = of_lines([line.encode() for line in box], ENDING)
    assert words.text(0.0).splitlines() == [
        "Traceback (most recent call last):",
        "  /home/ana/train.py:7 in main",
        "  ❱ 7     trainer.fit(model, ckpt_path='last.ckpt')",
        "FileNotFoundError: last.ckpt",
    ]


def test_crash_of_the_interpreter_is_told_by_its_innermost_frames() -> None:
    frames = [b'  File "a.py", line %d in f' % n for n in range(50)]
    words = of_lines(
        b"Fatal Python error: Segmentation fault", b"", b"Thread 0x01 (most recent call first):", frames
    )
    said = words.text(0.0).splitlines()
    assert said[:2] == ["Fatal Python error: Segmentation fault", '  File "a.py", line 0 in f']
    assert len(said) <= 8


def test_colours_are_left_out() -> None:
    assert last(of_lines(trace(b"\x1b[1;31mValueError\x1b[0m: bad"))) == "ValueError: bad"


def test_output_counts_where_errors_went_there() -> None:
    error, output = of_lines(b"tee: done"), of_lines(trace(b"ValueError: bad"))
    assert why(error, output, 0.0).endswith("ValueError: bad")
    assert why(of_lines(), of_lines(b"giving up"), 0.0) == "giving up"
    assert why(of_lines(b"giving up"), of_lines(b"step 3"), 0.0) == "giving up"


def test_mpi_that_could_not_begin_is_told_though_its_launcher_writes_on() -> None:
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
def test_whatever_is_written_little_is_kept(lines: list[bytes]) -> None:
    words = LastWords()
    for line in lines:
        words.add([line, b"[%d]: Traceback (most recent call last):" % (hash(line) % 99)], 0.0)
    assert len(words._open) <= MAX_OPEN
    assert len(words.text(0.0)) <= TRACE_BYTES + 5 * (REMEMBERED_LENGTH + 1)
