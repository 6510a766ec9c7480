"""What Slurm's accounting lets a user have: accounts, and with each of them qualities of service. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches

import msgspec

from shoal.errors import SpecError


class Association(msgspec.Struct, frozen=True, kw_only=True):
    account: str
    is_default: bool = False
    """Whom Slurm charges where none is named."""
    partition: str = ""
    """In that one alone; empty: in all."""
    qos: tuple[str, ...] = ()
    default_qos: str = ""


def read_choice(option: str, text: str) -> tuple[str, dict[str, str]]:
    """`NAME` for all jobs, `PROJECT=NAME` for those of one: separated by commas, in any order."""
    words = [word.partition("=") for word in text.split(",") if word]
    for_all = [name for name, mark, _ in words if not mark]
    if len(for_all) > 1 or any(mark and not (project and name) for project, mark, name in words):
        raise SpecError(
            f"`{option} {text}` is not one NAME for all and PROJECT=NAME for single projects",
            hint=f"`{option} NAME`, or `{option} NAME,PROJECT=NAME`",
        )
    return (for_all or [""])[0], {project: name for project, mark, name in words if mark}


def refuse_unknown(known: Collection[Association], accounts: Iterable[str], qos: Iterable[str]) -> None:
    """`SpecError` for what the user has not. Where accounting tells of nothing, Slurm alone knows."""
    if not known:
        return
    names = {one.account for one in known}
    _refuse("--account", "account", [name for name in accounts if name not in names], names)
    offered = {name for one in known for name in one.qos}
    if offered:
        _refuse("--qos", "QOS", [name for name in qos if name not in offered], offered)


def _refuse(option: str, what: str, unknown: list[str], choices: Collection[str]) -> None:
    if not unknown:
        return
    near = get_close_matches(unknown[0], choices, n=1)
    raise SpecError(
        f"Slurm lets you use no {what} `{unknown[0]}`; there is {', '.join(sorted(choices))}",
        hint=f"did you mean `{option} {near[0]}`?" if near else f"leave `{option}` out, or name one of these",
        choices=sorted(choices),
    )
