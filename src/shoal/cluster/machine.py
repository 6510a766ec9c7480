"""A machine that can run a script, and the script's result: all that applying steps needs to know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

HINT = "hint: "


@dataclass(frozen=True)
class ScriptResult:
    code: int
    out: str
    err: str

    @property
    def last_words(self) -> str:
        """Return the machine's error output about its failure, on one line."""
        lines = [line for line in self._lines if not line.startswith(HINT)]
        return "; ".join(lines[-3:]) or f"exit code {self.code}, without any error output"

    @property
    def hint(self) -> str:
        """Return what the script says to type, or ""."""
        return next((line.removeprefix(HINT) for line in self._lines if line.startswith(HINT)), "")

    @property
    def _lines(self) -> list[str]:
        return [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]


class RemoteMachine(Protocol):
    """A machine that can run a script as root."""

    @property
    def typed(self) -> str:
        """The command by which a person logs in there as we did."""
        ...

    @property
    def as_root(self) -> str:
        """The prefix of a command that a person runs there as root."""
        ...

    async def run(self, script: str, stdin: bytes = b"", timeout_s: float = 120.0) -> ScriptResult:
        """Run a script and return its result. After `EngineUnreachable` it may or may not have run."""
        ...

    async def hold(self) -> str:
        """Lock the machine until `close`. Return who holds the lock already, or ""."""
        ...

    async def close(self) -> None: ...
