"""`shoal doctor`: find what is wrong with this machine or this connection, and print what to type."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shoal.cli.checkup.machine import MACHINE_CHECKS, Finding, Level
from shoal.cli.checkup.server import SERVER_CHECKS
from shoal.cli.flags import JsonFlag
from shoal.cli.output import paint, print_json, screen_columns
from shoal.cli.text import one_line, wrapped

MARGIN = " " * 20


def doctor(*, json: JsonFlag = False) -> int:
    """Check this machine and the server you talk to; exit 1 if something is broken."""
    findings = list(examine((*MACHINE_CHECKS, *SERVER_CHECKS)))
    if json:
        print_json([finding.as_dict() for finding in findings])
    else:
        for finding in findings:
            print("\n".join(finding_lines(finding)))
    return 1 if any(finding.level is Level.BROKEN for finding in findings) else 0


def examine(checks: tuple[Callable[[], Finding], ...]) -> Iterator[Finding]:
    """Run every check, in order. A check that fails itself is a finding, too."""
    for check in checks:
        name = check.__name__.removeprefix("check_")
        try:
            yield check()
        except Exception as error:  # noqa: BLE001 - whatever is wrong, the other checks are still useful
            yield Finding(
                name, Level.WARN, f"could not check: {error}", "run `shoal doctor` again as yourself"
            )


def finding_lines(finding: Finding) -> list[str]:
    """Return the level, the name and the message, with words wrapped under each other on a narrow screen."""
    level = paint(finding.level, finding.level.value.ljust(6))
    first, *others = wrapped(one_line(finding.message), screen_columns() - len(MARGIN))
    result = [f"{level} {finding.name:<12} {first}", *(MARGIN + line for line in others)]
    if finding.hint and finding.level is not Level.OK:
        first, *others = wrapped(f"-> {one_line(finding.hint)}", screen_columns() - len(MARGIN) - 3)
        result += [MARGIN + first, *(f"{MARGIN}   {line}" for line in others)]
    return result
