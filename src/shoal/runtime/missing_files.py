"""Why a program did not find a file: it stayed on the machine that the job was submitted from. Pure.

Goes by the last lines that the program wrote, and by the names of what did not travel. Says nothing about a
file that is in neither.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from shoal.wire import LeftBehind, Order

MAX_WORDS = 20_000
MAX_CANDIDATES = 50
SHOWN = 200
NEVER = frozenset({".git", ".venv", "__pycache__", "node_modules"})
"""Folders that do not travel whatever git says."""
_SPEAKS_OF_FILES = re.compile(
    r"No such file|[Nn]ot found|FileNotFound|does(?: not|n't) exist|[Ee]rror opening|No module named"
    r"|[Mm]issing|(?:[Cc]an't|[Cc]annot|[Cc]ould not|[Uu]nable to) (?:open|access|find|read|load|stat)"
)
_QUOTED = re.compile(r"'([^'\n]+)'|\"([^\"\n]+)\"|`([^`\n]+)`|\u2018([^\u2019\n]+)\u2019")
_MODULE = re.compile(r"No module named '([\w.]+)'")
_PLAIN = re.compile(r"[^\s'\"`,;:()\[\]{}=<>]+")


def explain(words: str, order: Order, work: str) -> str:
    """What to say of the first file that a program missed and that did not travel; empty for none.

    `words`: its last lines. `work`: the directory that it ran in.
    """
    behind = order.left_behind or LeftBehind()
    for name in _missed(words[-MAX_WORDS:]):
        told = _stayed(name, behind, work) or _outside(name, order, behind, work)
        if told:
            return told
    return ""


def _missed(words: str) -> Iterator[str]:
    """What may be names of files in lines that speak of a missing one, the last line first."""
    num_seen = 0
    for line in reversed(words.splitlines()):
        if _SPEAKS_OF_FILES.search(line) is None:
            continue
        for module in _MODULE.findall(line):
            yield from (f"{module.replace('.', '/')}.py", f"{module.split('.')[0]}/")
        quoted = ["".join(found) for found in _QUOTED.findall(line)]
        for name in (*quoted, *_PLAIN.findall(line)):
            num_seen += 1
            if num_seen > MAX_CANDIDATES:
                return
            yield name


def _outside(name: str, order: Order, behind: LeftBehind, work: str) -> str:
    """Of a path that leads out of the folder: only the folder travelled. A program that has changed its
    directory may mean another folder by `..`.
    """
    is_above = name.startswith("../") and re.search(r"\bcd\s|chdir", order.run) is None
    share = os.path.dirname(work)
    path = os.path.normpath(os.path.join(work, name)) if is_above else os.path.normpath(name)
    if path == work or path.startswith(f"{work}/") or not (is_above or path.startswith(f"{share}/")):
        return ""
    shown = os.path.relpath(path, work)
    folder = f", {_short(behind.folder)}," if behind.folder else ""
    return (
        f"`{_short(shown)}` is outside of the folder that was submitted{folder} and only that folder "
        "is copied; submit from the folder above, or name it with `workdir: ..`"
    )


def _stayed(name: str, behind: LeftBehind, work: str) -> str:
    inner, is_theirs = _inside(name, behind, work)
    if not inner:
        return ""
    for names, because, remedy in (
        (behind.ignored, "ignored by git", "add it with `include: [{}]`"),
        (behind.excluded, "excluded by the job's `exclude`", "take the pattern out of `exclude`"),
    ):
        found = _named(inner, names)
        if found:
            same = inner.rstrip("/")
            is_never = not NEVER.isdisjoint(found.split("/"))
            what = same if found.endswith("/") and same.startswith(found) else found
            return (
                f"`{_short(what)}` was not found; it is in the folder that was submitted but "
                f"{'never copied unless named' if is_never else because}; "
                f"{remedy.format(_short(_pattern(found)))}"
            )
    if is_theirs:
        return (
            f"`{_short(name)}` is a path on the machine that submitted the job; here the files of its folder "
            f"are in the directory that the job runs in: write `{_short(inner)}`"
        )
    return ""


def _inside(name: str, behind: LeftBehind, work: str) -> tuple[str, bool]:
    """The name as it counts from the folder on, and whether it was told as a path of the submitter's."""
    slash = "/" if name.endswith("/") else ""
    path = os.path.normpath(name)
    while path.startswith("../"):
        path = path[3:]
    for folder in (work, behind.folder):
        if folder and path.startswith(f"{folder}/"):
            return path[len(folder) + 1 :] + slash, folder != work
    return ("", False) if path.startswith(("/", "..")) or path == "." else (path + slash, False)


def _named(inner: str, names: tuple[str, ...]) -> str:
    """The entry that is this file or a folder above it, or ends like it: a program may have changed its
    directory.
    """
    plain = inner.rstrip("/")
    for name in names:
        if plain == name.rstrip("/") or (name.endswith("/") and plain.startswith(name)):
            return name
    if "." not in os.path.basename(plain) and "/" not in plain:
        return ""  # a word such as `file`
    return next((name for name in names if name.rstrip("/").endswith(f"/{plain}")), "")


def _pattern(name: str) -> str:
    return re.sub(r"([*?\[\]\\])", r"\\\1", name)


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
