"""Install the stand-ins and the zygote's code for a job's scripts. Runs as the job's user.

The sources are read when this module is loaded, outside of the sandbox, because the job cannot read Shoal's
own files.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import shoal
from shoal.runtime.warm import launchers, mpirun, srun, stand_in

NAMES = ("python", "python3", *launchers.NAMES, *mpirun.NAMES, *srun.NAMES)
_PARTS = (
    *("context", "image", "imports", "launcher_config", "launcher_lock", "launchers", "mpi_command_line"),
    *("mpi_host", "mpi_rank", "mpi_rendezvous", "mpirun", "options", "plan", "preload", "program"),
    *("rank_identity", "srun", "stand_in", "zygote"),
)
_START = "import sys; sys.path[0:1] = [{lib!r}]; from shoal_warm import {part}; del sys.path[0]; "
_PYTHON = re.compile(
    r"(?:^|[\s;&|/])(?:python3?|torchrun|accelerate|deepspeed|mpi(?:run|exec)(?:\.[a-z]+)?|orterun|prterun)\s"
)
_PYTHON3 = re.compile(r"(?:^|[\s;&|/])python3\s")
_SCRIPT = re.compile(r"[^\s;&|'\"$]+\.py\b")


def _read(name: str) -> str:
    with open(os.path.join(os.path.dirname(__file__), f"{name}.py"), encoding="utf-8") as file:
        return file.read()


_HOOK = _read("hook")
_SOURCES = {"__init__": "", **{name: _read(name) for name in _PARTS}}


_BASH = """# Read by each bash of a rank that runs a script.
shoal_first() {{
    case $PATH in {bin}:*) ;; *) PATH={bin}:$PATH ;; esac
    case :${{PYTHONPATH-}}: in *:{hook}:*) ;; *) export PYTHONPATH={hook}${{PYTHONPATH:+:$PYTHONPATH}} ;; esac
}}
# `activate` of an environment calls this when it has put itself in front.
hash() {{
    builtin hash "$@"
    local status=$?
    shoal_first
    return $status
}}
shoal_first
if [ -n "${{SHOAL_BASH_ENV-}}" ]; then . "$SHOAL_BASH_ENV"; fi
"""


def is_python(run: str) -> bool:
    """Whether a script seems to start a Python program, so that a zygote is useful.

    The stand-ins do not depend on this, because a program may start a launcher that is not visible in `run`.
    """
    return _PYTHON.search(run) is not None


def install(
    folder: str, path: str, environment: dict[str, str] | None, expected: dict[str, Any] | None = None
) -> None:
    """Write the stand-ins and the copied sources below `folder`.

    `path`: the rank's PATH without the stand-ins. The first Python on it runs the stand-ins. If there is
    none, there can be no launcher either. `environment`: the zygote's, or None if there will be no zygote.
    `expected`: the plan and the modules of an earlier zygote, if known.
    """
    # Searched here, as the job's user inside the sandbox, because the supervisor sees other files.
    interpreters = {name: stand_in.find(name, path, "") for name in ("python", "python3")}
    interpreter = interpreters["python"] or interpreters["python3"]
    for name in ("bin", "hook", "lib/shoal_warm"):
        os.makedirs(f"{folder}/{name}", exist_ok=True)
    for name, text in _SOURCES.items():
        _write(f"{folder}/lib/shoal_warm/{name}.py", text)
    _write(f"{folder}/hook/sitecustomize.py", _HOOK)
    bash = {"bin": _quoted(f"{folder}/bin"), "hook": _quoted(f"{folder}/hook")}
    _write(f"{folder}/bash_env", _BASH.format(**bash))
    _write(f"{folder}/{launchers.WORLDS}", "")
    if interpreter is None:
        return
    for name, file in interpreters.items():
        _write(f"{folder}/interpreter.{name}", f"{file or interpreter}\n")
    if environment is not None:
        _write(f"{folder}/{launchers.WARM}", "")
    if expected is not None:
        _write(f"{folder}/{launchers.EXPECTED}", json.dumps(expected))
    for name in NAMES:
        code = _START.format(lib=f"{folder}/lib", part="stand_in")
        code += f"stand_in.main({folder!r}, {name!r}, sys.argv[1:])"
        _write(
            f"{folder}/bin/{name}", f'#!/bin/sh\nexec {_quoted(interpreter)} -IS -c {_quoted(code)} "$@"\n'
        )
        os.chmod(f"{folder}/bin/{name}", 0o700)


def zygote_script(folder: str, work: str, run: str) -> str:
    """Return the shell script that becomes the ranks' zygote. It ends if `install` found no Python."""
    scripts = _SCRIPT.findall(run)
    arguments = f"{folder!r}, {work!r}, {scripts!r}, {os.path.dirname(shoal.__file__)!r}"
    code = _START.format(lib=f"{folder}/lib", part="zygote") + f"sys.exit(zygote.main({arguments}))"
    name = "python3" if _PYTHON3.search(run) else "python"
    file = _quoted(f"{folder}/interpreter.{name}")
    # The last argument tells the zygote how it was started, which `sys.executable` does not.
    return f'[ -e {file} ] || exit 0; read -r python <{file}; exec "$python" -c {_quoted(code)} "$python"'


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
