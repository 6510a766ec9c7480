"""Launchers that people write in front of their program, and which the supervisor has replaced.

`torchrun --nproc-per-node 4 train.py --lr 1` is, in a rank, `python train.py --lr 1`: the other ranks are
there already.
"""

from __future__ import annotations

import os
import re
import sys

NAMES = ("torchrun", "accelerate", "deepspeed")
_PER_NODE = re.compile(r"--(?:nproc[-_]per[-_]node|num[-_]gpus)(?:=(.*))?$")


def program(name: str, arguments: list[str], environment: dict[str, str]) -> list[str]:
    """The arguments for `python`. Ends the process with a sentence if there is no program in them."""
    for position, word in enumerate(arguments):
        if word in ("-m", "--module"):
            return _checked(arguments[:position], ["-m", *arguments[position + 1 :]], environment)
        if word.endswith(".py") and os.path.isfile(word):
            return _checked(arguments[:position], arguments[position:], environment)
    sys.stderr.write(
        f"shoal: `{name}` has no program: no word of it is a file that ends with `.py`, and it has no `-m`\n"
        "hint: write `python your_program.py` in `run`; Shoal starts the ranks itself\n"
    )
    os._exit(2)


def _checked(options: list[str], words: list[str], environment: dict[str, str]) -> list[str]:
    asked, there = per_node(options), environment.get("LOCAL_WORLD_SIZE", "")
    if asked is not None and asked.isdigit() and asked != there:
        if environment.get("LOCAL_RANK") == "0":
            sys.stderr.write(
                f"shoal: the launcher asks for {asked} processes on a node, and the job has {there}\n"
                f"hint: set `ranks_per_node: {asked}` in the job, or leave the option out\n"
            )
        os._exit(2)
    return words


def per_node(options: list[str]) -> str | None:
    """How many processes on a node a launcher's options ask for."""
    for position, word in enumerate(options):
        match = _PER_NODE.match(word)
        if match is not None:
            return match[1] if match[1] is not None else "".join(options[position + 1 : position + 2])
    return None
