"""Read command-line arguments: the fast path of `shoal run`, and the parser's errors in plain sentences.

Loading the command tree costs 60 ms. `read_run` reads the usual forms of `shoal run` without it: flags that
it knows, each with a plain value, and a program after `--`. It leaves anything else (help, a job file, a
mistake, short flags joined as in `-dx`) to the tree. `tests/unit/cli/test_fast_path.py` checks that both read
the same meaning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

SHORT = {"-n": "--name", "-p": "--project", "-e": "--env", "-d": "--detach"}
SWITCHES = frozenset({"--detach", "--json", "--exclusive", "--shared"})
REPEATED = {
    "--env": "env",
    "--secret": "secrets",
    "--mount": "mounts",
    "--after": "after",
    "--retry-on": "retry_on",
    "--log-rule": "log_rules",
    "--include": "include",
    "--exclude": "exclude",
    "--exclude-node": "exclude_nodes",
    "--require": "require",
}
ONCE = {
    "--" + name.replace("_", "-"): name
    for name in (
        *("name", "project", "queue", "priority", "time_limit", "deadline", "workdir", "setup", "array"),
        *("gpus", "nodes", "cpus", "memory", "disk", "ranks_per_node", "topology"),
        *("retry", "retry_backoff", "checkpoint", "grace", "fence", "network", "world"),
    )
}


STDIN = "/dev/stdin"
"""Stands for `-`, because the command tree takes a lone dash for an option."""


class TypedRun(NamedTuple):
    """A `shoal run` without a job file: the typed flags by their spec names, and the program's arguments."""

    flags: dict[str, Any]
    program: tuple[str, ...]
    should_detach: bool
    should_print_json: bool


def read_run(argv: list[str]) -> TypedRun | None:
    """Return what `shoal ARGV` asks for, or None if the command tree must read it."""
    if argv[:1] != ["run"] or "--" not in argv:
        return None
    end = argv.index("--")
    flags: dict[str, Any] = {}
    switches: set[str] = set()
    arguments = iter(argv[1:end])
    for argument in arguments:
        flag = SHORT.get(argument, argument)
        if flag in SWITCHES and flag not in switches:
            switches.add(flag)
            continue
        value = next(arguments, None)
        if value is None or value.startswith("-"):
            return None
        if flag in REPEATED:
            flags[REPEATED[flag]] = (*flags.get(REPEATED[flag], ()), value)
        elif flag in ONCE and ONCE[flag] not in flags:
            flags[ONCE[flag]] = value
        else:
            return None
    for switch in ("--exclusive", "--shared"):
        if switch in switches:
            flags[switch.removeprefix("--")] = True
    return TypedRun(flags, tuple(argv[end + 1 :]), "--detach" in switches, "--json" in switches)


def name_stdin(head: list[str]) -> list[str]:
    """Replace the `-` that stands for a job file on standard input with `STDIN`."""
    if head[:1] != ["run"]:
        return head
    takes_value = {*ONCE, *REPEATED, *SHORT} - {"-d"}
    before = ["", *head[:-1]]
    return [
        STDIN if word == "-" and last not in takes_value else word
        for last, word in zip(before, head, strict=True)
    ]


SENTENCES = (
    (
        r'Command "[^"]*" parameter (?:--)?(\S+) requires an argument\.',
        "",
    ),  # `_missing` decides: a flag without its value, or a missing argument
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


def plain_message(message: str, typed: Sequence[str], command: str) -> str:
    """Return the parser's `message` about `typed` in our words; return an unknown message unchanged."""
    for pattern, ours in SENTENCES:
        match = re.fullmatch(pattern, message, re.DOTALL)
        if match is None:
            continue
        if not ours:
            return _missing(match[1], typed, command)
        sentence = match.expand(ours).replace('"', "`")
        near = match[match.re.groups] if "Did you mean" in pattern else None
        return f"{sentence}; did you mean `{near}`?" if near else sentence
    return message


def misspelt_subcommand(typed: Sequence[str], parts: Sequence[str]) -> str:
    """Return an error if the word after the command nearly matches one of its `parts`, else ""."""
    from shoal.spec.error_text import or_nearest  # needed only after a mistake

    word = typed[1] if len(typed) > 1 else ""
    near = "" if word in parts or word.startswith("-") else or_nearest(word, parts)
    return f"unknown command `{word}`{near}" if near else ""


def with_flags(message: str, typed: Sequence[str]) -> str:
    """Replace the field names in a server's message with the flags that were typed for them."""
    flags = {word.partition("=")[0] for word in typed if word.startswith("--")}

    def flag(match: re.Match[str]) -> str:
        field = match[1]
        bare = next((field.removesuffix(unit) for unit in UNITS if field.endswith(unit)), field)
        named = f"--{bare.replace('_', '-')}"
        return f"`{named}`" if named in flags else match[0]

    return FIELD.sub(flag, message)


def _missing(name: str, typed: Sequence[str], command: str) -> str:
    """Name what is missing: the value of a flag that was typed, else the argument after the command."""
    flag = f"--{name}"
    if flag in typed[:-1]:
        return f"`{flag}` needs a value; `{typed[typed.index(flag) + 1]}` is none"
    if typed and typed[-1].startswith("-"):
        return f"`{typed[-1]}` needs a value"
    if (typed[0], name) in NEEDED_FLAGS:
        return f"`shoal {command}` needs `--{name}`"
    return f"`shoal {command}` needs {name.replace('-', '_').upper()}"
