"""What the parser of the command line found wrong, in plain sentences."""

from __future__ import annotations

import re
from collections.abc import Sequence

SENTENCES = (
    (
        r'Command "[^"]*" parameter (?:--)?(\S+) requires an argument\.',
        "",
    ),  # decided below: value or argument
    (r"Unused Tokens: \['(.*?)'(?:, .*)?\]\.", r"`\1` is one word too many"),
    (r"Parameter (\S+) specified multiple times\.", r"`\1` is given more than once"),
    (r'Invalid value for (\S+): unable to convert "(.*)" into int\.', r"`\1` takes a whole number, not `\2`"),
    (r'Invalid value for (\S+): unable to convert "(.*)" into bool\.', r"`\1` takes no value"),
    (
        r'Invalid value "(.*?)" for (\S+)\. Choose from: ([^.]*)\.(?: Did you mean "(.*?)"\?)?',
        r"`\2` is one of \3, not `\1`",
    ),
    (r"Unknown option: (\S+?)\.(?: Did you mean (\S+)\?)?", r"unknown option `\1`"),
    (r'Unknown command "(.*?)"\.(?: Did you mean "(.*?)"\?)?.*', r"unknown command `\1`"),
)

NEEDED_FLAGS = {("plan", "target"), ("plan", "nodes"), ("reserve", "for"), ("drill", "for")}
FIELD = re.compile(r"^`([a-z][a-z_]*)`")
UNITS = ("_s", "_at", "_bytes")


def plain(told: str, typed: Sequence[str], command: str) -> str:
    """The parser's sentence about `typed`, which calls that command, in ours; one that is not known stays as
    it is.
    """
    for pattern, ours in SENTENCES:
        found = re.fullmatch(pattern, told, re.DOTALL)
        if found is None:
            continue
        if not ours:
            return _missing(found[1], typed, command)
        sentence = found.expand(ours).replace('"', "`")
        near = found[found.re.groups] if "Did you mean" in pattern else None
        return f"{sentence}; did you mean `{near}`?" if near else sentence
    return told


def misspelt(typed: Sequence[str], parts: Sequence[str]) -> str:
    """That the word after a command of commands is almost one of its `parts`; empty: it is one, or none."""
    from shoal.spec.wording import or_nearest  # only mistakes need it

    word = typed[1] if len(typed) > 1 else ""
    near = "" if word in parts or word.startswith("-") else or_nearest(word, parts)
    return f"unknown command `{word}`{near}" if near else ""


def with_flags(told: str, typed: Sequence[str]) -> str:
    """What a server finds wrong with its own field, said of the flag that was typed for it."""
    flags = {word.partition("=")[0] for word in typed if word.startswith("--")}

    def flag(found: re.Match[str]) -> str:
        field = found[1]
        bare = next((field.removesuffix(unit) for unit in UNITS if field.endswith(unit)), field)
        named = f"--{bare.replace('_', '-')}"
        return f"`{named}`" if named in flags else found[0]

    return FIELD.sub(flag, told)


def _missing(name: str, typed: Sequence[str], command: str) -> str:
    """A flag that was typed lacks its value; one that was not stands for a word after the command."""
    flag = f"--{name}"
    if flag in typed[:-1]:
        return f"`{flag}` needs a value; `{typed[typed.index(flag) + 1]}` is none"
    if typed and typed[-1].startswith("-"):
        return f"`{typed[-1]}` needs a value"
    if (typed[0], name) in NEEDED_FLAGS:
        return f"`shoal {command}` needs `--{name}`"
    return f"`shoal {command}` needs {name.replace('-', '_').upper()}"
