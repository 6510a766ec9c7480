"""Text that users write cannot control a terminal, and all output fits its width."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cli import output
from shoal.cli.output import table
from shoal.cli.text import (
    clean,
    clean_lines,
    duration,
    hanging_indent,
    joined_lines,
    log_text,
    one_line,
    shorten,
    size,
    width,
    wrapped,
    written_files_text,
)  # fmt: skip


@pytest.mark.parametrize(
    ("hostile", "harmless"),
    [
        ("\x1b]0;owned\x07name", "name"),
        ("\x1b]52;c;ZWNobyBoaQ==\x1b\\name", "name"),
        ("\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\", "click"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[2J\x1b[1;1Hgone", "gone"),
        ('\x1bP$q"p\x1b\\x', "x"),
        ("\x1bcreset", "reset"),
        ("\x9b31mred", "red"),
        ("\x9d0;title\x9cx", "x"),
        ("a\x00b\x07c\x08d\x7fe\x85f", "abcdef"),
        ("safe\u202egpj.exe", "safegpj.exe"),
        ("half \ud800 pair", "half  pair"),
        ("unfinished \x1b]0;never ends", "unfinished "),
        ("tab\tand\nnewline", "tab\tand\nnewline"),
        ("Zürich 東京", "Zürich 東京"),
    ],
)
def test_terminal_controls_are_removed(hostile: str, harmless: str) -> None:
    assert clean(hostile) == harmless


@given(st.text(alphabet=st.characters(codec=None), max_size=60))
def test_no_text_carries_a_control_character_through(text: str) -> None:
    for char in clean(text):
        assert char in "\t\n" or (ord(char) >= 32 and not 0x7F <= ord(char) <= 0x9F)


def test_a_progress_bar_shows_what_a_terminal_would_have_left() -> None:
    assert log_text("10%\r50%\r100%\r") == "100%"


@given(st.text(max_size=40), st.integers(1, 30))
def test_shortened_text_never_exceeds_the_width(text: str, columns: int) -> None:
    assert width(shorten(one_line(text), columns)) <= columns


@pytest.mark.parametrize("columns", [40, 60, 80, 132])
def test_a_table_fits_the_screen(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = [("vision/17", "東京" * 10, "waits " * 30), ("v/1", "b", "c")]
    lines = table(("JOB", "NAME", "WHY"), rows, elastic="WHY").splitlines()
    assert all(width(line) <= columns for line in lines)


def test_a_cell_with_newlines_and_escapes_stays_one_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = table(("A", "B"), [("x\ny", "\x1b[31mz")], elastic="B")
    assert text == "A    B\nx y  z"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (-5, "0s"),
        (59.9, "59s"),
        (61, "1m01s"),
        (1800, "30m"),
        (11100, "3h05m"),
        (352800, "4d02h"),
    ],
)
def test_durations_are_short(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("num", "text"), [(None, "-"), (0, "0 B"), (1536, "1.5 KiB"), (32 << 30, "32 GiB")])
def test_sizes_are_readable(num: int | None, text: str) -> None:
    assert size(num) == text


def test_commands_in_backticks_stay_on_one_line_where_they_fit() -> None:
    text = "error: nothing here is long but `shoal run --gpus 2 -- python train.py` which is typed"
    assert hanging_indent(text, 48) == [
        "error: nothing here is long but",
        "       `shoal run --gpus 2 -- python train.py`",
        "       which is typed",
    ]
    assert wrapped("`a command that is longer than that`", 20) == [
        "`a command that is",
        "longer than that`",
    ]
    assert wrapped("", 20) == [""]


def test_slow_work_is_shown_on_a_terminal_and_erased(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with output.slow_work() as tell:
        tell("too soon")
    monkeypatch.setattr(output, "SLOW_S", -1.0)
    with output.slow_work() as tell:
        tell("into a pipe")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with output.slow_work() as tell:
        tell("reading ...")
        tell("too soon after the last")
    assert capsys.readouterr().err == "\r\x1b[Kreading ...\r\x1b[K"


TRACEBACK = """\
n1: rank 0 exited with code 1
Traceback (most recent call last):
  File "/w/boom.py", line 4, in <module>
    load()
  File "/w/boom.py", line 2, in load
\traise ValueError("my data is broken")
ValueError: my data is broken
"""


def test_a_traceback_on_several_lines_keeps_its_indents() -> None:
    expected = TRACEBACK.replace("\t", "    ").splitlines()
    assert clean_lines(TRACEBACK) == expected
    assert clean_lines("  sentence\n\n  \x1b[31mword\x1b[0m  \n") == ["sentence", "  word"]
    assert clean_lines(" \n\n") == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TRACEBACK, "n1: rank 0 exited with code 1: ValueError: my data is broken"),
        (
            TRACEBACK.replace("Traceback (most recent call last):\n", "") + "a second line of it\n",
            "n1: rank 0 exited with code 1: ValueError: my data is broken",
        ),
        (TRACEBACK + "\nDuring handling of it:\n\n" + TRACEBACK.replace("ValueError:", "KeyError:"),
         "n1: rank 0 exited with code 1: KeyError: my data is broken"),
        ("n1: rank 0 exited with code 2\n  oh\n  no", "n1: rank 0 exited with code 2: oh: no"),
        ("", ""),
    ],
)  # fmt: skip
def test_traceback_on_one_line_is_the_exception(text: str, expected: str) -> None:
    assert joined_lines(text) == expected


VISIBLE_FORMAT = {0x0600, 0x0601, 0x0602, 0x0603, 0x0604, 0x0605, 0x06DD, 0x070F, 0x0890, 0x0891, 0x08E2} | {
    0x110BD,
    0x110CD,
}
"""Format characters that readers see: signs of numbers."""


def test_no_invisible_format_character_passes() -> None:
    passed = {
        code
        for code in range(0x110000)
        if unicodedata.category(chr(code)) == "Cf" and clean(f"a{chr(code)}b") != "ab"
    }
    assert passed == VISIBLE_FORMAT


@pytest.mark.parametrize("at", [0x13430, 0x13439, 0x1343F, 0x13441, 0x16FE4, 0x1D159, 0x2800, 0x3164, 0x2065])
def test_no_blank_of_another_category_passes(at: int) -> None:
    assert clean(f"a{chr(at)}b") == "ab"


@pytest.mark.parametrize(
    "text",
    [
        *("\u3164", "\u115f", "\uffa0", "\u2800", "\u034f", "\U000e0101", "pay\u200dpal"),
        *("abc\ufe0fd\ufe0f\ufe0f", "\ufe0f", "1\ufe0f", "a\ufe0f\u200db", "\u200d", "x\u200c"),
    ],
)
def test_filler_selector_or_stray_joiner_is_removed(text: str) -> None:
    assert clean(text) == text.encode("ascii", "ignore").decode()


@pytest.mark.parametrize(
    "letters", ["\u00e9\u00e9", "\u0431\u0430", "\u65e5\u672c", "\u2102\u2115", "e\u0301"]
)
@pytest.mark.parametrize("unseen", ["\u200c", "\u200d", "\ufe0f", "\ufe0f\u200d", "\ufe0f\ufe0f"])
def test_letters_that_nothing_shapes_have_nothing_between_them(letters: str, unseen: str) -> None:
    assert clean(unseen.join(letters) + unseen) == letters


@pytest.mark.parametrize(
    "text",
    [
        *("\u0645\u06cc\u200c\u062e\u0648", "\u0915\u094d\u200d\u0937", "\u09b0\u200d\u09cd\u09af"),
        *(
            "\U0001f469\u200d\U0001f4bb",
            "\u2764\ufe0f",
            "\u2139\ufe0f",
            "1\ufe0f\u20e3",
            "\u2764\ufe0f\u200d\U0001f525",
        ),
        *("\U0001f3f3\ufe0f\u200d\U0001f308", "\U0001f937\U0001f3fd\u200d\u2640\ufe0f", "\u26a0\ufe0f"),
    ],
)
def test_joiner_within_a_word_or_an_emoji_stays(text: str) -> None:
    assert clean(f"a {text} b {text}") == f"a {text} b {text}"


def test_an_emoji_has_one_selector_and_one_joiner() -> None:
    assert clean("\u2764\ufe0f\ufe0f\u200d\u200d\U0001f525\u200d x") == "\u2764\ufe0f\u200d\U0001f525 x"


def test_lost_files_are_named_with_how_to_keep_them() -> None:
    facts = {"num_files": 3, "num_bytes": 1288490188, "names": ["out/a.pt"], "is_more": False}
    lost = "wrote 3 files, 1.2 GiB, that are deleted with the attempt: out/a.pt and 2 more; "
    assert written_files_text({**facts, "folder": "out"}, None) == f"{lost}keep them with `checkpoint: out`"
    assert written_files_text(facts, "ckpt") == f"{lost}write what is to stay below `ckpt`"
    hostile = {**facts, "is_more": True, "folder": "$(rm -rf x)", "names": ["\x1b]0;x\x07m.pt"]}
    assert written_files_text(hostile, None) == (
        "wrote at least 3 files, 1.2 GiB, that are deleted with the attempt: m.pt and 2 more; write what is "
        "to stay below a folder, as `ckpt`, and name it with `checkpoint: ckpt`"
    )
