"""Where each rank stands when nothing moves: its Python stacks, taken from outside before anything is killed.

`py-spy` reads a process that cannot answer, stopped ones included. Where there is none, or the kernel does
not let it, ranks that use `shoal.runtime` write their own on a signal; a stopped one cannot. All ranks at
once, in bounded time and size.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Mapping

import msgspec

from shoal.runtime.board import STACKS_AREA, STACKS_SIGNAL, stacks_at
from shoal.runtime.warm.stand_in import find

LIMIT_S, OWN_WORDS_S = 1.5, 0.5
"""For all of them together; and for those who write their own, if need be."""
LOOK_S = 0.01
WAITED_IN = ("/torch/", "/shoal/runtime/rank/")
SAVED_IN = "/shoal/runtime/rank/checkpoint/"
MAX_BYTES = 64 << 10
"""Of one rank: some hundred threads."""
_SPIED = re.compile(r"^ {4}(?P<name>.+) \((?P<file>[^()]+):(?P<line>\d+)\)$", re.MULTILINE)
_WRITTEN = re.compile(r'^ {2}File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current )?[Tt]hread ", re.MULTILINE)


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A process to look at, by its place on the board."""

    pid: int
    slot: int
    can_answer: bool
    """It writes its own stacks when it is asked to, and is not stopped."""


class Stacks(msgspec.Struct, frozen=True, kw_only=True):
    """The stacks of one process as text. No place: there are none, and the text says why."""

    text: str
    place: str = ""
    """The innermost frame of its main thread: `forward (model.py:31)`."""
    is_waiting: bool = False
    """It is inside of PyTorch, or of Shoal's own part of a rank: most likely it waits for others."""
    is_saving: bool = False
    """It waits for a checkpoint under way."""


def taken(subjects: Iterable[Subject], spy: str | None, board_fd: int) -> dict[int, Stacks]:
    """The stacks of all of them, by slot. Blocks for two seconds at most, and raises for nothing it sees.

    `spy`: the program that reads processes, None: there is none. Main thread only: it waits for children.
    """
    asked = {one.slot: one for one in subjects}
    spied = _spied({slot: one.pid for slot, one in asked.items()}, spy) if spy is not None else {}
    found = {slot: text for slot, text in spied.items() if _frames(text)}
    own = _answers([one for slot, one in asked.items() if one.can_answer and slot not in found], board_fd)
    found.update(own)
    return {slot: _judged(found.get(slot) or _excuse(one, spied)) for slot, one in asked.items()}


def spy_program(path: str) -> str | None:
    """`py-spy`, beside our own Python or on the node's path; None: not installed."""
    return find("py-spy", f"{os.path.dirname(sys.executable)}:{path}", "")


def own_pids(inner: Iterable[int], pids: Iterable[int], *, is_inside: bool = False) -> dict[int, int]:
    """Our numbers for processes that know themselves by those of their own namespace.

    `is_inside`: that is not ours, so whoever is beside us and has such a number is another.
    """
    wanted, found = {pid for pid in inner if pid > 0}, {}
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
            named = next((line for line in file if line.startswith(b"NSpid:")), b"")
            numbers = [int(word) for word in named.split()[1:]]
            if len(numbers) > int(is_inside) and numbers[-1] in wanted:
                found[numbers[-1]] = pid
    return found


def _spied(pids: Mapping[int, int], spy: str) -> dict[int, str]:
    """What it says of each; of one that it did not finish with, as much as it said. Of one for which no
    process or no page could be had, nothing.
    """
    pages: dict[int, int] = {}
    children: set[int] = set()
    with contextlib.suppress(OSError):
        for slot, pid in pids.items():
            pages[slot] = _page()
            children.add(_spawn(spy, pid, pages[slot]))
    until = time.monotonic() + LIMIT_S
    while (children := {pid for pid in children if not _is_over(pid)}) and time.monotonic() < until:
        time.sleep(LOOK_S)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    texts = {slot: _text(page, 0) for slot, page in pages.items()}
    for page in pages.values():
        os.close(page)
    return texts


def _page() -> int:
    """What `py-spy` writes into. It cannot grow: the stacks are as deep as the job makes them."""
    page = os.memfd_create("stacks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(page, STACKS_AREA)
    fcntl.fcntl(page, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    return page


def _spawn(spy: str, pid: int, page: int) -> int:
    words = [spy, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)]
    output = [(os.POSIX_SPAWN_DUP2, page, 1), (os.POSIX_SPAWN_DUP2, page, 2)]
    return os.posix_spawn(spy, words, {"PATH": os.path.dirname(spy)}, file_actions=output)


def _is_over(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


def _answers(subjects: list[Subject], board_fd: int) -> dict[int, str]:
    """What these write themselves, once it does not grow any more."""
    for one in subjects:
        with contextlib.suppress(OSError):
            old = os.pread(board_fd, STACKS_AREA, stacks_at(one.slot)).rstrip(b"\0")
            os.pwrite(board_fd, bytes(len(old)), stacks_at(one.slot))
            os.kill(one.pid, STACKS_SIGNAL)
    until = time.monotonic() + OWN_WORDS_S
    texts: dict[int, str] = {}
    while subjects and time.monotonic() < until:
        time.sleep(LOOK_S * 3)
        before, texts = texts, {one.slot: _text(board_fd, stacks_at(one.slot)) for one in subjects}
        if all(texts.values()) and texts == before:
            break
    return {slot: text for slot, text in texts.items() if _frames(text)}


def _text(fd: int, offset: int) -> str:
    """What was written there last. One that answers again writes behind what it wrote before."""
    data = os.pread(fd, STACKS_AREA, offset).strip(b"\0")[:MAX_BYTES]
    return data.decode("utf-8", "replace")


def _excuse(one: Subject, spied: Mapping[int, str]) -> str:
    said = [line for line in spied.get(one.slot, "").splitlines() if line.strip()]
    why = f"py-spy says: {said[-1]}" if said else "py-spy is not here, or could not be started"
    own = "it did not answer" if one.can_answer else "it is stopped and cannot answer"
    return f"no stacks: {own}, and {why}"


def _judged(text: str) -> Stacks:
    frames = _frames(text)
    if not frames:
        return Stacks(text=text)
    name, file, line = (frames[0][key] for key in ("name", "file", "line"))
    _, package, inside = file.rpartition("/site-packages/")
    short = inside if package else os.path.basename(file)
    # Who waits for a save that is under way waits for a thread, which waits for the others.
    last = next((one["file"] for one in frames if not one["file"].endswith("/threading.py")), file)
    return Stacks(
        text=text,
        place=f"{name} ({short}:{line})",
        is_waiting=any(own in last for own in WAITED_IN),
        is_saving=SAVED_IN in last,
    )


def _frames(text: str) -> list[re.Match[str]]:
    """The frames of the main thread, innermost first."""
    cuts = [match.start() for match in _THREAD.finditer(text)]
    threads = [text[at:end] for at, end in zip(cuts, [*cuts[1:], len(text)], strict=False)]
    named = [one for one in threads if '"MainThread"' in one.partition("\n")[0]]
    main = (named or threads[-1:] or [""])[0]  # where threads have no names, the oldest comes last
    return list(_SPIED.finditer(main)) or list(_WRITTEN.finditer(main))
