"""Somewhere a script can run, and what it answers: all that carrying out steps needs to know of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

HINT = "hint: "


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def last_words(self) -> str:
        """What the machine said about its failure, on one line."""
        lines = [line for line in self._lines if not line.startswith(HINT)]
        return "; ".join(lines[-3:]) or f"exit code {self.code}, and no word about it"

    @property
    def hint(self) -> str:
        """What the script itself says is to be typed; mostly nothing."""
        return next((line.removeprefix(HINT) for line in self._lines if line.startswith(HINT)), "")

    @property
    def _lines(self) -> list[str]:
        return [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]


class Machine(Protocol):
    """Somewhere a script can run as root."""

    @property
    def typed(self) -> str:
        """By which words a person would log in there as we did."""
        ...

    @property
    def as_root(self) -> str:
        """The words before a command that a person has run there as root."""
        ...

    async def run(self, script: str, stdin: bytes = b"", timeout_s: float = 120.0) -> Answer:
        """What the script answered. `EngineUnreachable`: it may or may not have run."""
        ...

    async def hold(self) -> str:
        """Keep everybody else from changing the machine until `close`. Says who does already, or nothing."""
        ...

    async def close(self) -> None: ...
