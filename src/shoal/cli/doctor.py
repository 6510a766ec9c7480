"""`shoal doctor`: what is wrong with this machine or this connection, and what to type about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shoal.cli.checkup import Finding, Level
from shoal.cli.checkup_machine import MACHINE_CHECKS
from shoal.cli.checkup_server import SERVER_CHECKS
from shoal.cli.flags import JsonFlag
from shoal.cli.show import paint, print_json, screen_columns
from shoal.cli.text import one_line, wrapped

MARGIN = " " * 20


def doctor(*, json: JsonFlag = False) -> int:
    """Look at this machine and at the server you talk to; exit 1 if something is broken."""
    found = list(examine((*MACHINE_CHECKS, *SERVER_CHECKS)))
    if json:
        print_json([finding.as_dict() for finding in found])
    else:
        for finding in found:
            print("\n".join(lines(finding)))
    return 1 if any(finding.level is Level.BROKEN for finding in found) else 0


def examine(checks: tuple[Callable[[], Finding], ...]) -> Iterator[Finding]:
    """Every check, in order. One that fails itself is a finding, not the end."""
    for check in checks:
        name = check.__name__.removeprefix("check_")
        try:
            yield check()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with this machine, the rest is still worth seeing
            yield Finding(
                name, Level.WARN, f"could not look: {error}", "run `shoal doctor` again as yourself"
            )


def lines(finding: Finding) -> list[str]:
    """Level, name and what was found; whole words, under each other where the screen is narrow."""
    level = paint(finding.level, finding.level.value.ljust(6))
    first, *others = wrapped(one_line(finding.told), screen_columns() - len(MARGIN))
    found = [f"{level} {finding.name:<12} {first}", *(MARGIN + line for line in others)]
    if finding.hint and finding.level is not Level.OK:
        first, *others = wrapped(f"-> {one_line(finding.hint)}", screen_columns() - len(MARGIN) - 3)
        found += [MARGIN + first, *(f"{MARGIN}   {line}" for line in others)]
    return found
