"""Launchers that people write in front of their program, and which the supervisor has replaced.

`torchrun --nproc-per-node 4 train.py --lr 1` is, in a rank, `python train.py --lr 1`: the other ranks are
there already.
"""

from __future__ import annotations

import os
import sys

NAMES = ("torchrun", "accelerate", "deepspeed")
LAUNCH = "torch.distributed.launch"
MODULES = {
    "torch.distributed.run": "torchrun",
    LAUNCH: LAUNCH,
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
"""The same launchers as `python -m` starts them."""
_PER_NODE = ("--nproc-per-node", "--num-gpus")
_IN_ALL = ("--num-processes",)
_LOCAL_RANK = {LAUNCH: "--local-rank", "deepspeed": "--local_rank"}
"""Those that hand a program its number as an argument."""
_NO_LOCAL_RANK = {"--use-env", "--use_env", "--no_local_rank"}


def named(name: str, arguments: list[str]) -> tuple[str | None, list[str]]:
    """The launcher that a command is, and its own arguments. None: it is none."""
    if name in NAMES:
        return name, arguments
    words = arguments[1:] if arguments[:1] == ["-u"] else arguments
    if words[:1] == ["-m"] and len(words) > 1 and words[1] in MODULES:
        return MODULES[words[1]], words[2:]
    return None, arguments


def options(arguments: list[str]) -> list[str]:
    """What stands before the program."""
    at = _program_at(arguments)
    return arguments if at is None else arguments[:at]


def program(name: str, arguments: list[str], environment: dict[str, str]) -> list[str]:
    """The arguments for `python`. Ends the process with a sentence if there is no program in them."""
    at = _program_at(arguments)
    if at is None:
        sys.stderr.write(
            f"shoal: `{name}` has no program: no word is a file that ends with `.py`, and there is no `-m`\n"
            "hint: write `python your_program.py` in `run`; Shoal starts the ranks itself\n"
        )
        os._exit(2)
    before, words = arguments[:at], arguments[at:]
    refuse_other_counts(before, environment)
    head = ["-m", words[1]] if words[0] in ("-m", "--module") else words[:1]
    rest = words[len(head) :]
    if name in _LOCAL_RANK and "LOCAL_RANK" in environment and not _NO_LOCAL_RANK & set(before):
        rest = [f"{_LOCAL_RANK[name]}={environment['LOCAL_RANK']}", *rest]
    return [*head, *rest]


def _program_at(arguments: list[str]) -> int | None:
    for position, word in enumerate(arguments):
        if word in ("-m", "--module") and position + 1 < len(arguments):
            return position
        if word.endswith(".py") and os.path.isfile(word):
            return position
    return None


def refuse_other_counts(before: list[str], environment: dict[str, str]) -> None:
    """End the process with a sentence if the launcher was to start another number of ranks than there are."""
    for asked_by, name, where in (
        (_PER_NODE, "LOCAL_WORLD_SIZE", "on a node"),
        (_IN_ALL, "WORLD_SIZE", "in all"),
    ):
        asked, there = value_of(asked_by, before), environment.get(name, "")
        if asked is not None and asked.isdigit() and asked != there:
            nodes = int(environment.get("GROUP_WORLD_SIZE", "1")) if where == "in all" else 1
            # From every rank: the first to end has the others stopped, perhaps before they have spoken.
            sys.stderr.write(
                f"shoal: the launcher asks for {asked} processes {where}, and the job has {there}\n"
                f"hint: set `ranks_per_node: {-(-int(asked) // nodes)}` in the job, or leave the option out\n"
            )
            os._exit(2)


def value_of(names: tuple[str, ...], words: list[str]) -> str | None:
    """What an option was given, as `--option=value` or `--option value`; None: it is not there.

    `-` and `_` are the same in it, as launchers take them.
    """
    for position, word in enumerate(words):
        name, has_value, value = word.partition("=")
        if name.replace("_", "-") in names:
            return value if has_value else "".join(words[position + 1 : position + 2])
    return None
