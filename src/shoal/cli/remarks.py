"""What is worth a word when a job is submitted: true things about it that its owner may not expect."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.cli.text import one_line, size
from shoal.client.credentials import read_server_file

NAMED = 2
MAX_SNAPSHOT = 256 << 20
NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*[0-9]")
LAUNCHERS = ("mpirun", "mpiexec")
"""They start processes themselves if they are named by their path. Launchers in Python notice their rank."""
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


def about(
    run: str, job: Mapping[str, Any], env: Mapping[str, str], home: Path | None, own_env: Mapping[str, str]
) -> Iterator[str]:
    """Notes on a job that was just submitted.

    `env` is the submitter's environment, `own_env` the job's, `home` the server's if it is on this machine.
    """
    ranks = (job.get("request") or {}).get("ranks_per_node") or 1
    launcher = launcher_of(run)
    if launcher and ranks > 1:
        yield (
            f"note: `{launcher}` starts processes itself, and {ranks} of it run on each node, one for each "
            "rank; write its name without the path, or start one with `--ranks-per-node 1`"
        )
    if home is not None and sys.stderr.isatty() and "PATH" not in own_env:
        place = unseen_environment(env, home)
        if place is not None and place not in run:
            yield (
                f"note: the environment you activated, {one_line(place)}, is not on the PATH of jobs, which "
                f"is the one that `shoal up` had; `--env PATH={one_line(place)}/bin:/usr/bin:/bin` has this "
                "job use it"
            )


def about_files(behind: Mapping[str, Any]) -> Iterator[str]:
    """Notes on files of the folder that did not travel. `behind`: what the submission said of them."""
    count, names = behind.get("num_files") or 0, [one_line(name) for name in behind.get("files") or ()]
    for pattern in behind.get("useless") or ():
        meant = f"; to keep a job off a node write `--exclude-node {one_line(pattern)}`"
        told = f"note: `exclude`: `{one_line(pattern)}` names no file"
        yield told + (meant if NODE.fullmatch(pattern) else "")
    if not count or not names:
        return
    more = "more than " if behind.get("is_more") else ""
    files = "1 file, " if count == 1 and not more else f"{more}{count:,} files, "
    others = f" and {count - NAMED:,} more" if count > NAMED else ""
    verb, them = ("is", "it") if count == 1 and not more else ("are", "them")
    if behind["size_bytes"] > MAX_SNAPSHOT:
        remedy = f"{them} would be too large to copy: mount the folder with `--mount DIR:/data`"
    else:
        pattern = one_line(behind["add_with"])
        option = f"`--include {shlex.quote(pattern)}`"
        is_all = them == "it" or pattern.endswith("/")
        remedy = f"add {them} with {option}" if is_all else f"add those the job needs, such as with {option}"
    yield (
        f"note: {files}{size(behind['size_bytes'])}, ignored by git, {verb} not copied: "
        f"{', '.join(names[:NAMED])}{others}; {remedy}"
    )


def launcher_of(run: str) -> str | None:
    """The program that a line starts with, if it is one that starts ranks by itself: named by its path."""
    try:
        words = shlex.split(run.strip().partition("\n")[0], comments=True)
    except ValueError:
        return None
    while words and (words[0] == "exec" or ASSIGNMENT.match(words[0])):
        words.pop(0)
    _, slash, name = words[0].rpartition("/") if words else ("", "", "")
    if not slash:
        return None
    return words[0] if name in LAUNCHERS else None


def unseen_environment(env: Mapping[str, str], home: Path) -> str | None:
    """The activated Python environment, if this machine's server does not have it on the PATH of jobs."""
    place = env.get("VIRTUAL_ENV") or env.get("CONDA_PREFIX")
    path = (read_server_file(home) or {}).get("path")
    if not place or not isinstance(path, str):
        return None
    programs = os.path.realpath(f"{place}/bin")
    return None if any(os.path.realpath(entry) == programs for entry in path.split(":")) else place
