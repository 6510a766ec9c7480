"""Shell completion: `shoal completion bash` prints a script, `shoal --install-completion` installs one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, get_args

from cyclopts import Parameter

from shoal.cli.main import build_app
from shoal.errors import SpecError

Shell = Literal["bash", "zsh", "fish"]
ShellName = Annotated[
    Shell | None, Parameter(help="bash, zsh or fish; by default the shell named in `SHELL`.")
]


def completion(shell: ShellName = None) -> int:
    """Print a completion script, for example for `source <(shoal completion bash)`."""
    chosen = shell or detect()
    print(with_files(build_app().generate_completion(prog_name="shoal", shell=chosen)))
    return 0


def with_files(script: str) -> str:
    """Make bash complete file names if Shoal has no candidates, such as for arguments after `--`."""
    return script.replace("complete -F _shoal shoal", "complete -o bashdefault -o default -F _shoal shoal")


def install(shell: ShellName = None) -> int:
    """Install completion for this user and print which file was written."""
    chosen = shell or detect()
    place = build_app().install_completion(shell=chosen, add_to_startup=chosen != "fish")
    place.write_text(with_files(place.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"completion for {chosen} is in {place}; it works in new shells")
    return 0


def detect() -> Shell:
    """Return this user's shell, from `SHELL`."""
    name = Path(os.environ.get("SHELL", "")).name
    for shell in get_args(Shell):
        if name == shell:
            return shell  # type: ignore[no-any-return]
    raise SpecError(f"no completion for shell `{name or 'unknown'}`", hint="`shoal completion bash`")
