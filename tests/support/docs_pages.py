"""The documentation as data: its fenced blocks, and the commands that its transcripts type."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.style.tree import ROOT

FENCE = re.compile(r"```(\w*) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROMPT = "$ "


@dataclass(frozen=True)
class FencedBlock:
    """One fenced block. `title` is the file that the reader is told to save it as, if any."""

    language: str
    title: str
    text: str


@dataclass
class TypedCommand:
    """One command of a transcript, and the lines shown below it."""

    command: str
    output: list[str] = field(default_factory=list)


def pages() -> list[Path]:
    """Every page a reader may open, the generated ones included."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks(page: Path) -> Iterator[FencedBlock]:
    return blocks_of(page.read_text(encoding="utf-8"))


def blocks_of(text: str) -> Iterator[FencedBlock]:
    for match in FENCE.finditer(text):
        yield FencedBlock(*match.groups())


def transcript(block: FencedBlock) -> list[TypedCommand]:
    """The commands of a `console` block in order; what stands before the first belongs to none."""
    found: list[TypedCommand] = []
    for line in block.text.splitlines():
        if line.startswith(PROMPT):
            found.append(TypedCommand(line.removeprefix(PROMPT)))
        elif found:
            found[-1].output.append(line)
    return found
