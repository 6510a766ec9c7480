"""Put stand-ins and the zygote's code where a job's scripts find them. Runs as the job's user.

The sources are read when this module is loaded, outside the sandbox, where the job cannot read ours.
"""

from __future__ import annotations

import json
import os
import re

from shoal.runtime.warm import launchers, mpirun, names, slurm, stand_in

NAMES = ("python", "python3", *launchers.NAMES, *mpirun.NAMES, *slurm.NAMES)
_PARTS = (
    *("accelerate", "deepspeed_hosts", "imports", "launchers", "mpi_channel", "mpi_host", "mpi_line"),
    *("mpi_meeting", "mpi_rank", "mpirun", "names", "one_launcher", "options", "program", "real_parser"),
    *("slurm", "stand_in", "zygote"),
)
_START = "import sys; sys.path[0:1] = [{lib!r}]; from shoal_warm import {part}; del sys.path[0]; "
_PYTHON = re.compile(
    r"(?:^|[\s;&|/])(?:python3?|torchrun|accelerate|deepspeed|mpi(?:run|exec)(?:\.[a-z]+)?|orterun|prterun)\s"
)
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
    """Whether a script seems to start a Python program: then a process that has made its imports is of use.

    The stand-ins do not depend on it: a program may start a launcher that no look at `run` finds.
    """
    return _PYTHON.search(run) is not None


def install(
    folder: str, path: str, environment: dict[str, str] | None, expected: dict[str, str] | None = None
) -> None:
    """Write everything below `folder`. `path`: the rank's, without us. The Python on it runs the stand-ins;
    where it has none there is no launcher either. `environment`: the zygote's, if there will be one;
    `expected`: the modules, and their files, that it should import, where that is known.
    """
    # Looked for here, as the job's user inside the sandbox: the supervisor sees other files.
    interpreter = stand_in.find("python", path, "") or stand_in.find("python3", path, "")
    for name in ("bin", "hook", "lib/shoal_warm"):
        os.makedirs(f"{folder}/{name}", exist_ok=True)
    for name, text in _SOURCES.items():
        _write(f"{folder}/lib/shoal_warm/{name}.py", text)
    _write(f"{folder}/hook/sitecustomize.py", _HOOK)
    bash = {"bin": _quoted(f"{folder}/bin"), "hook": _quoted(f"{folder}/hook")}
    _write(f"{folder}/bash_env", _BASH.format(**bash))
    _write(f"{folder}/{names.WORLDS}", "")
    if interpreter is None:
        return
    _write(f"{folder}/interpreter", f"{interpreter}\n")
    if environment is not None:
        _write(f"{folder}/known", stand_in.known(interpreter, environment))
    if expected is not None:
        _write(f"{folder}/{names.EXPECTED}", json.dumps(expected))
    for name in NAMES:
        code = _START.format(lib=f"{folder}/lib", part="stand_in")
        code += f"stand_in.main({folder!r}, {name!r}, sys.argv[1:])"
        _write(
            f"{folder}/bin/{name}", f'#!/bin/sh\nexec {_quoted(interpreter)} -IS -c {_quoted(code)} "$@"\n'
        )
        os.chmod(f"{folder}/bin/{name}", 0o700)


def zygote_script(folder: str, work: str, run: str) -> str:
    """The shell script that becomes the zygote of these ranks; it ends where `install` found no Python."""
    scripts = [os.path.join(work, name) for name in _SCRIPT.findall(run)]
    code = (
        _START.format(lib=f"{folder}/lib", part="zygote") + f"sys.exit(zygote.main({folder!r}, {scripts!r}))"
    )
    told = _quoted(f"{folder}/interpreter")
    return f'[ -e {told} ] || exit 0; read -r python <{told}; exec "$python" -c {_quoted(code)}'


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
