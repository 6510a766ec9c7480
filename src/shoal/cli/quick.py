"""The usual way to type `shoal run`, read without loading the command tree, which costs 60 ms.

It reads only what it is sure of: flags it knows, each with a plain value, and a program after `--`.
Anything else (help, a job file, a mistake, `-d` and its like run together) is left to the tree. What it
reads it reads as the tree would: `tests/unit/test_cli_quick.py` holds the two against each other.
"""

from __future__ import annotations

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
"""What `-` stands for: the tree takes a lone dash for an option."""


class Typed(NamedTuple):
    """A `shoal run` without a job file: flags by the spec's names, as typed, and the program's words."""

    flags: dict[str, Any]
    program: tuple[str, ...]
    should_detach: bool
    should_print_json: bool


def read_run(argv: list[str]) -> Typed | None:
    """What `shoal ARGV` asks for; None where the command tree must say."""
    if argv[:1] != ["run"] or "--" not in argv:
        return None
    end = argv.index("--")
    flags: dict[str, Any] = {}
    switches: set[str] = set()
    words = iter(argv[1:end])
    for word in words:
        flag = SHORT.get(word, word)
        if flag in SWITCHES and flag not in switches:
            switches.add(flag)
            continue
        value = next(words, None)
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
    return Typed(flags, tuple(argv[end + 1 :]), "--detach" in switches, "--json" in switches)


def name_stdin(head: list[str]) -> list[str]:
    """`shoal run` with the `-` that stands for a job file on standard input spelled out."""
    if head[:1] != ["run"]:
        return head
    takes_value = {*ONCE, *REPEATED, *SHORT} - {"-d"}
    before = ["", *head[:-1]]
    return [
        STDIN if word == "-" and last not in takes_value else word
        for last, word in zip(before, head, strict=True)
    ]
