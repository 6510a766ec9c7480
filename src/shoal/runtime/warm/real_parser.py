"""Ask a launcher itself where its program is, when it has options that are in no table of ours.

Another version may have them, or they are misspelt. The launcher is imported for it, which takes seconds.
"""

from __future__ import annotations

import subprocess

from . import launchers
from .options import LAUNCH

IMPORTS = {
    "torchrun": "from torch.distributed.run import parse_args",
    LAUNCH: "from torch.distributed.launch import parse_args",
    "deepspeed": "from deepspeed.launcher.runner import parse_args",
    "accelerate-launch": "from accelerate.commands.launch import launch_command_parser as parser; "
    "parse_args = parser().parse_args",
}
_CODE = """
import sys
words = sys.argv[1:]
found = vars(parse_args(words))
rest = found["user_args" if "user_args" in found else "training_script_args"]
print(f"\\n{len(words) - len(rest) - 1}")
"""


def program_at(python: str, name: str, words: list[str], option: str) -> int:
    """The position of the program among the launcher's words. `Refused`: the launcher cannot say.

    `option`: the one that is not known here.
    """
    done = subprocess.run(
        [python, "-c", f"{IMPORTS[name]}{_CODE}", *words], capture_output=True, text=True, check=False
    )
    told = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode == 0 and launchers.is_number(told):
        return int(told)
    reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    raise launchers.Refused(
        f"`{name}` does not take the option `{option}`: {reason}",
        f"leave `{option}` out, or write it as `{name} --help` does",
    )
