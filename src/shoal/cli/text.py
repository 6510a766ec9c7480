"""Make text from other people safe and short enough for a terminal.

Names and log lines may carry escape sequences that retitle, repaint or type into a terminal. None of them
passes, and neither in a pipe.
"""

from __future__ import annotations

import re
import time
import unicodedata
from typing import Any

ESCAPE = re.compile(
    r"(?:\x1b\]|\x9d).*?(?:\x07|\x1b\\|\x9c|$)"  # OSC: titles, links, the clipboard
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f]).*?(?:\x1b\\|\x9c|$)"  # DCS, SOS, PM, APC
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # CSI: colours, cursor, screen
    r"|\x1b[ -/]*[0-~]?",  # everything else that starts with ESC
    re.DOTALL,
)
CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029"
    r"\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2060-\u206f\u3164\ufe00-\ufe0e\uffa0\ufff0-\ufffb"
    r"\U000e0000-\U000e0fff"
    r"\u2800\U00013430-\U0001345f\U00016fe4\U0001d159]"
)
"""What `clean` removes beside the Unicode category Cf: controls (C0 except tab and newline, DEL, C1), lone
surrogates and line separators; what Unicode calls ignorable by default, with the ranges it reserves for more
(fillers, tags, variation selectors except U+FE0F); and four characters that show nothing although their
category says otherwise: a Braille blank, the format controls of hieroglyphs, a filler and an empty note.
"""
VISIBLE_FORMAT = frozenset(
    map(chr, (*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD))
)
"""The format characters (category Cf) that show a sign of their own, with numbers inside."""
JOINERS = frozenset("\u200c\u200d")
SHAPING = re.compile("[\u200c\u200d\ufe0f]+")
EMOJI = re.compile(
    "[\u00a9\u00ae\u203c\u2049\u2122\u2139\u2190-\u21ff\u2300-\u23ff\u24c2\u25a0-\u27bf\u2900-\u297f\u2b00-\u2bff"
    "\u3030\u303d\u3297\u3299\U0001f000-\U0001faff]"
)
"""Blocks of symbols, without letters, that U+FE0F draws in colour or that a joiner combines."""
KEYCAPS, KEYCAP = frozenset("0123456789#*"), "\u20e3"
VIRAMA = 9
"""The combining class of the sign that removes a consonant's vowel. A joiner beside it chooses a form."""

FRAME = re.compile(r'\s+File ".*", line \d+')
"""A traceback line that names a file and a line number."""
FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""A name that needs no quotes in YAML or in a shell."""
PIECE = re.compile(r"(?:`[^`]*`|[^\s`]|`)+")
LEAD = re.compile(r"(?:error|hint|note|waiting|outlook|change): |-- +(?:waiting: |hint: )?| +")


def clean(text: object) -> str:
    """Return `text` without terminal controls and invisible characters; tabs and newlines stay."""
    cleaned = CONTROL.sub("", ESCAPE.sub("", str(text)))
    if cleaned.isascii():
        return cleaned
    for char in set(cleaned) - VISIBLE_FORMAT - JOINERS:
        if unicodedata.category(char) == "Cf":
            cleaned = cleaned.replace(char, "")
    return SHAPING.sub(_shaping, cleaned)


def _shaping(run: re.Match[str]) -> str:
    """Return the joiners and U+FE0F of the run that change how its neighbours look."""
    text, first, last = run.string, run[0][0], run[0][-1]
    before = text[run.start() - 1] if run.start() else " "
    after = text[run.end()] if run.end() < len(text) else " "
    if EMOJI.match(before):
        style = "\ufe0f" if first == "\ufe0f" else ""
        return style + ("\u200d" if last == "\u200d" and EMOJI.match(after) else "")
    if before in KEYCAPS and after == KEYCAP:
        return "\ufe0f" if first == "\ufe0f" else ""
    is_cursive = unicodedata.bidirectional(before) == unicodedata.bidirectional(after) == "AL"
    is_beside_virama = VIRAMA in (unicodedata.combining(before), unicodedata.combining(after))
    return first if first in JOINERS and (is_cursive or is_beside_virama) else ""


def one_line(text: object) -> str:
    """Return the cleaned text in one line, for table cells and sentences."""
    return re.sub(r"[\t\n]+", " ", clean(text)).strip()


def clean_lines(text: object) -> list[str]:
    """Return the cleaned lines without empty ones. Of a failure reason the first line is a sentence; the
    others are the program's last output and keep their indents, because a traceback needs them.
    """
    lines = [clean(raw).expandtabs(4).rstrip() for raw in str(text).splitlines()]
    first, *others = [line for line in lines if line] or [""]
    return [first.strip(), *others] if first else []


def joined_lines(text: object) -> str:
    """Return the lines of a reason joined by colons; of a traceback, only the exception."""
    lines = clean_lines(text)
    frames = [at for at, line in enumerate(lines) if FRAME.match(line)]
    if frames:
        raised = [line for line in lines[frames[-1] :] if not line.startswith(" ")] or lines[-1:]
        lines = [*lines[:1], *raised[:1]] if frames[0] else raised[:1]
    return ": ".join(line.strip() for line in lines)


def log_text(text: object) -> str:
    """Return a log line as a terminal would show it: the text after the last carriage return, cleaned."""
    raw = str(text).rstrip("\r")
    return clean(raw.rsplit("\r", 1)[-1])


def width(text: str) -> int:
    """Return the columns that `text` takes: East Asian wide characters take two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def shorten(text: str, columns: int) -> str:
    """Cut to at most `columns`, marked with `~` where it was cut: every terminal and font has that sign."""
    if width(text) <= columns:
        return text
    kept = ""
    for char in text:
        if width(kept + char) > columns - 1:
            break
        kept += char
    return kept + "~" if columns > 0 else ""


def wrapped(text: str, columns: int) -> list[str]:
    """Wrap at most `columns` wide. A command in backticks stays on one line if it fits on one, and a word
    without spaces is not cut, so that both can be copied.
    """
    lines: list[str] = []
    for piece in PIECE.findall(text):
        for word in [piece] if width(piece) <= columns else piece.split(" "):
            if lines and width(lines[-1]) + 1 + width(word) <= columns:
                lines[-1] += f" {word}"
            else:
                lines.append(word)
    return lines or [""]


def hard_wrapped(text: str, columns: int) -> list[str]:
    """`wrapped`, but cut words that are too long: for a narrow column."""
    return [
        line[start : start + columns]
        for line in wrapped(text, columns)
        for start in range(0, max(len(line), 1), columns)
    ]


def hanging_indent(text: str, columns: int) -> list[str]:
    """`wrapped`, with further lines indented below the text after `error: `, `hint: `, `note: ` or `-- `."""
    if width(text) <= columns:
        return [text]
    first = LEAD.match(text)
    lead = first.group() if first else ""
    head, *others = wrapped(text[len(lead) :], columns - len(lead))
    return [lead + head, *(" " * len(lead) + line for line in others)]


def failing_loop_text(failing: dict[str, Any]) -> str:
    """Say how often a loop of the control plane has failed, since when, and why."""
    times, why = failing["times"], failing.get("why")
    how_often = "once" if times == 1 else f"{times} times"
    text = f"`{one_line(failing['loop'])}` has failed {how_often} since {utc(failing['since'])} UTC"
    return f"{text}: {one_line(why)}" if why else text


def taken_port_text(port: int) -> str:
    """Say that services listen on another port because theirs is taken."""
    return f"port {port} is another program's; services have another one, which `shoal services` shows"


def unanswered_engine_text(engine: str, away: dict[str, Any]) -> str:
    """Say that the nodes shown are old because their cluster does not answer. `away` comes from the API."""
    subject = "engine" if engine == "local" else one_line(engine).capitalize()
    since = f"{utc(away['since'])} UTC"
    if away.get("has_answered", True):
        return f"the {subject} does not answer since {since}; what is shown of its nodes is as of then"
    never = f"the {subject} has not answered this control plane, which asks since {since}"
    return f"{never}; what is shown of its nodes is older"


def utc(at: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return a moment in UTC, whatever the local time zone. The screen around it says `UTC` or `Z`."""
    return time.strftime(form, time.gmtime(at))


def duration(seconds: float | None) -> str:
    """`7s`, `12m`, `3h05m`, `4d02h`: at most six characters for a year."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s" if whole < 600 else f"{whole // 60}m"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def size(num_bytes: float | None) -> str:
    """`512 MiB`, `1.5 GiB`."""
    if num_bytes is None:
        return "-"
    amount, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1024 and len(units) > 1:
        amount /= 1024
        units.pop(0)
    return f"{amount:.0f} {units[0]}" if amount >= 10 or amount == int(amount) else f"{amount:.1f} {units[0]}"


def written_files_text(written: dict[str, Any], checkpoint: object) -> str:
    """Say which files of a job are deleted with the attempt, and how to keep them. `checkpoint`: the folder
    whose files the job keeps.
    """
    count, names = written["num_files"], [one_line(name) for name in written["names"]]
    which = f"{', '.join(names)}{f' and {count - len(names):,} more' if count > len(names) else ''}"
    folder = one_line(written.get("folder") or "")
    if checkpoint:
        remedy = f"write what is to stay below `{one_line(checkpoint)}`"
    elif FOLDER.fullmatch(folder):
        remedy = f"keep {'it' if count == 1 else 'them'} with `checkpoint: {folder}`"
    else:
        remedy = "write what is to stay below a folder, as `ckpt`, and name it with `checkpoint: ckpt`"
    amount = f"{'at least ' if written['is_more'] else ''}{count:,} {'file' if count == 1 else 'files'}"
    is_are = "that is" if count == 1 else "that are"
    return (
        f"wrote {amount}, {size(written['num_bytes'])}, {is_are} deleted with the attempt: {which}; {remedy}"
    )


def number(value: Any) -> str:
    """`8` rather than `8.0`."""
    return "-" if value is None else f"{value:g}"
