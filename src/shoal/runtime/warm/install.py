"""Put stand-ins and the zygote's code where a job's scripts find them. Runs as the job's user.

The sources are read when this module is loaded, outside the sandbox, where the job cannot read ours.
"""

from __future__ import annotations

import json
import os
import re

from shoal.runtime.warm import launchers, mpirun, names, stand_in

FOLDER = ".shoal"
NAMES = ("python", "python3", *launchers.NAMES, *mpirun.NAMES)
_PARTS = (
    *("accelerate", "imports", "launchers", "mpi_channel", "mpi_host", "mpi_line", "mpi_meeting", "mpi_rank"),
    *("mpirun", "names", "program", "stand_in", "zygote"),
)
_START = "import sys; sys.path[0:1] = [{lib!r}]; from shoal_warm import {part}; del sys.path[0]; "
_PYTHON = re.compile(
    r"(?:^|[\s;&|/])(?:python3?|torchrun|accelerate|deepspeed|mpi(?:run|exec)(?:\.[a-z]+)?|orterun|prterun)\s"
)
_SCRIPT = re.compile(r"[^\s;&|'\"$]+\.py\b")


def _read(name: str) -> str:
    with open(os.path.join(os.path.dirname(__file__), f"{name}.py"), encoding="utf-8") as file:
        return file.read()


_SOURCES = {"__init__": "", **{name: _read(name) for name in _PARTS}}


def is_python(run: str) -> bool:
    """Whether a script seems to start a Python program, or ranks; if not, nothing here would be used."""
    return _PYTHON.search(run) is not None


def install(
    interpreter: str, environment: dict[str, str] | None, expected: dict[str, str] | None = None
) -> None:
    """Write everything below the current directory. `environment`: the zygote's, if there will be one;
    `expected`: the modules, and their files, that it should import, where that is known.
    """
    folder = os.path.abspath(FOLDER)
    os.makedirs(f"{folder}/bin", exist_ok=True)
    os.makedirs(f"{folder}/lib/shoal_warm", exist_ok=True)
    for name, text in _SOURCES.items():
        _write(f"{folder}/lib/shoal_warm/{name}.py", text)
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


def zygote_script(work: str, interpreter: str, run: str) -> str:
    """The shell script that becomes the zygote of these ranks."""
    folder = os.path.join(work, FOLDER)
    scripts = [os.path.join(work, name) for name in _SCRIPT.findall(run)]
    code = (
        _START.format(lib=f"{folder}/lib", part="zygote") + f"sys.exit(zygote.main({folder!r}, {scripts!r}))"
    )
    return f"exec {_quoted(interpreter)} -c {_quoted(code)}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
