"""A snapshot of a node's ranks when none makes a step: their Python stacks, and which ranks hold up the
others.

The stacks are taken from outside before anything is killed. `py-spy` reads a process that cannot answer, even
a stopped one. If it is not installed or the kernel does not let it, ranks that use `shoal.runtime` write
their own stacks on a signal, which a stopped one cannot. All ranks are read at once, in bounded time and
size.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from shoal.runtime.process import tree
from shoal.runtime.process.watcher import Process
from shoal.runtime.rank.board import STACKS_AREA, STACKS_SIGNAL, Heartbeat, RankBoard, stacks_offset
from shoal.runtime.supervisor.endings import Hang
from shoal.runtime.warm.stand_in import find

LIMIT_S, OWN_DUMP_S = 1.5, 0.5
"""The limit for all stacks together, and for ranks that write their own after that."""
LOOK_S = 0.01
WAITED_IN = ("/torch/", "/shoal/runtime/rank/")
SAVED_IN = "/shoal/runtime/rank/checkpoint/"
MAX_BYTES = 64 << 10
"""The limit for one rank: some hundred threads."""
_SPIED = re.compile(r"^ {4}(?P<name>.+) \((?P<file>[^()]+):(?P<line>\d+)\)$", re.MULTILINE)
_WRITTEN = re.compile(r'^ {2}File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current )?[Tt]hread ", re.MULTILINE)


class StackTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A process to take the stacks of, by its slot on the board."""

    pid: int
    slot: int
    can_dump_stacks: bool
    """It writes its own stacks on a signal, and is not stopped."""


class RankStacks(msgspec.Struct, frozen=True, kw_only=True):
    """The stacks of one process as text. If `frame` is empty there are none, and the text says why."""

    text: str
    frame: str = ""
    """The innermost frame of its main thread: `forward (model.py:31)`."""
    is_waiting: bool = False
    """It is inside PyTorch, or in Shoal's own part of a rank, so it most likely waits for other ranks."""
    is_saving: bool = False
    """It waits for a checkpoint that is being saved."""


def take_stacks(targets: Iterable[StackTarget], spy: str | None, board_fd: int) -> dict[int, RankStacks]:
    """Take the stacks of all targets, by slot. Blocks for at most two seconds, and never raises.

    `spy`: the path of `py-spy`, or None. Main thread only, because it waits for children.
    """
    pending = {target.slot: target for target in targets}
    spied = (
        _run_py_spy({slot: target.pid for slot, target in pending.items()}, spy) if spy is not None else {}
    )
    stacks = {slot: text for slot, text in spied.items() if _frames(text)}
    dumps = _request_dumps(
        [target for slot, target in pending.items() if target.can_dump_stacks and slot not in stacks],
        board_fd,
    )
    stacks.update(dumps)
    return {
        slot: _parse_stacks(stacks.get(slot) or _why_none(target, spied)) for slot, target in pending.items()
    }


def spy_program(path: str) -> str | None:
    """Return the path of `py-spy`, beside our own Python or on the node's PATH. None: not installed."""
    return find("py-spy", f"{os.path.dirname(sys.executable)}:{path}", "")


def host_pids(
    inner: Iterable[int], pids: Iterable[int], *, has_own_namespace: bool = False
) -> dict[int, int]:
    """Map pids of the ranks' namespace to our own pids.

    `has_own_namespace`: that namespace is not ours, so a process of ours with such a pid is another one.
    """
    wanted, host_pid_of = {pid for pid in inner if pid > 0}, {}
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
            named = next((line for line in file if line.startswith(b"NSpid:")), b"")
            numbers = [int(word) for word in named.split()[1:]]
            if len(numbers) > int(has_own_namespace) and numbers[-1] in wanted:
                host_pid_of[numbers[-1]] = pid
    return host_pid_of


def _run_py_spy(pids: Mapping[int, int], spy: str) -> dict[int, str]:
    """Return the output of `py-spy` for each process, and what there is of it if `py-spy` did not finish.

    Empty for a process for which no `py-spy` could be started or no file be made.
    """
    dump_files: dict[int, int] = {}
    children: set[int] = set()
    with contextlib.suppress(OSError):
        for slot, pid in pids.items():
            dump_files[slot] = _make_dump_file()
            children.add(_spawn(spy, pid, dump_files[slot]))
    until = time.monotonic() + LIMIT_S
    while (children := {pid for pid in children if not _is_over(pid)}) and time.monotonic() < until:
        time.sleep(LOOK_S)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    texts = {slot: _text(fd, 0) for slot, fd in dump_files.items()}
    for fd in dump_files.values():
        os.close(fd)
    return texts


def _make_dump_file() -> int:
    """Return a file for the output of `py-spy`. It cannot grow: the job decides how deep its stacks are."""
    dump_file = os.memfd_create("stacks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(dump_file, STACKS_AREA)
    fcntl.fcntl(dump_file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    return dump_file


def _spawn(spy: str, pid: int, dump_file: int) -> int:
    command = [spy, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)]
    output = [(os.POSIX_SPAWN_DUP2, dump_file, 1), (os.POSIX_SPAWN_DUP2, dump_file, 2)]
    return os.posix_spawn(spy, command, {"PATH": os.path.dirname(spy)}, file_actions=output)


def _is_over(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


def _request_dumps(targets: list[StackTarget], board_fd: int) -> dict[int, str]:
    """Return the stacks that these ranks write themselves, once the text stops growing."""
    for target in targets:
        with contextlib.suppress(OSError):
            old = os.pread(board_fd, STACKS_AREA, stacks_offset(target.slot)).rstrip(b"\0")
            os.pwrite(board_fd, bytes(len(old)), stacks_offset(target.slot))
            os.kill(target.pid, STACKS_SIGNAL)
    until = time.monotonic() + OWN_DUMP_S
    texts: dict[int, str] = {}
    while targets and time.monotonic() < until:
        time.sleep(LOOK_S * 3)
        before, texts = (
            texts,
            {target.slot: _text(board_fd, stacks_offset(target.slot)) for target in targets},
        )
        if all(texts.values()) and texts == before:
            break
    return {slot: text for slot, text in texts.items() if _frames(text)}


def _text(fd: int, offset: int) -> str:
    """Return the newest text. A rank that answers again appends to what it wrote before."""
    data = os.pread(fd, STACKS_AREA, offset).strip(b"\0")[:MAX_BYTES]
    return data.decode("utf-8", "replace")


def _why_none(target: StackTarget, spied: Mapping[int, str]) -> str:
    lines = [line for line in spied.get(target.slot, "").splitlines() if line.strip()]
    why = f"py-spy says: {lines[-1]}" if lines else "py-spy is not here, or could not be started"
    reason = "it did not answer" if target.can_dump_stacks else "it is stopped and cannot answer"
    return f"no stacks: {reason}, and {why}"


def _parse_stacks(text: str) -> RankStacks:
    frames = _frames(text)
    if not frames:
        return RankStacks(text=text)
    name, file, line = (frames[0][key] for key in ("name", "file", "line"))
    _, package, inside = file.rpartition("/site-packages/")
    short = inside if package else os.path.basename(file)
    # A rank that waits for a save waits for a thread, which waits for the other ranks.
    last = next((frame["file"] for frame in frames if not frame["file"].endswith("/threading.py")), file)
    return RankStacks(
        text=text,
        frame=f"{name} ({short}:{line})",
        is_waiting=any(module in last for module in WAITED_IN),
        is_saving=SAVED_IN in last,
    )


def _frames(text: str) -> list[re.Match[str]]:
    """Return the frames of the main thread, innermost first."""
    cuts = [match.start() for match in _THREAD.finditer(text)]
    threads = [text[at:end] for at, end in zip(cuts, [*cuts[1:], len(text)], strict=False)]
    named = [thread for thread in threads if '"MainThread"' in thread.partition("\n")[0]]
    main = (named or threads[-1:] or [""])[0]  # without thread names, the oldest thread comes last
    return list(_SPIED.finditer(main)) or list(_WRITTEN.finditer(main))


class HangSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of all ranks of a node at one moment."""

    step: int
    """The lowest step that was complete."""
    stacks: tuple[tuple[Process, RankStacks], ...]
    stopped: frozenset[int]
    """Processes that were stopped with a signal."""
    culprits: tuple[Process, ...]
    """Ranks that do not wait while others do, or all ranks if that does not show."""
    waits_for_others: bool
    """Every rank here only waits, so it may be for a rank of another node."""
    is_saving: bool = False
    """A rank waits for a checkpoint that is being saved, which takes as long as the storage does."""

    def hang(self, description: str) -> Hang:
        """Return the hang. The first of the culprits is named in it."""
        first = self.culprits[0]
        place = next(stacks.frame for process, stacks in self.stacks if process is first)
        return Hang(description=description, rank=first.rank, frame=place)


def take_snapshot(
    ranks: Sequence[Process],
    board: RankBoard,
    board_fd: int,
    pids_of_task: set[int],
    path: str,
    *,
    has_own_namespace: bool,
) -> HangSnapshot:
    """Take the stacks of all ranks.

    `pids_of_task`: every process of the task. `path`: where programs are found. `has_own_namespace`: ranks
    have a PID namespace, so their own pids differ from ours.
    """
    beats = {process.slot: board.heartbeat(process.slot) for process in ranks}
    stopped = tree.stopped_or_traced(pids_of_task)
    pids = host_pids((beat.pid for beat in beats.values()), pids_of_task, has_own_namespace=has_own_namespace)
    subjects = [
        StackTarget(
            pid=pids[beat.pid],
            slot=slot,
            can_dump_stacks=beat.can_dump_stacks and pids[beat.pid] not in stopped,
        )
        for slot, beat in beats.items()
        if beat.pid in pids
    ]
    taken = take_stacks(subjects, spy_program(path), board_fd)
    unseen = RankStacks(text="no stacks: its process is not to be found")
    rank_stacks = tuple((process, taken.get(process.slot, unseen)) for process in ranks)
    # A process that a rank started may be stopped, or traced, for reasons of its own.
    motionless = tuple(process for process in ranks if pids.get(beats[process.slot].pid) in stopped)
    return HangSnapshot(
        step=min(beat.step for beat in beats.values()),
        stacks=rank_stacks,
        stopped=frozenset(stopped),
        culprits=motionless or _culprits(rank_stacks, beats),
        waits_for_others=not motionless
        and all(stacks.is_waiting or not stacks.frame for _, stacks in rank_stacks),
        is_saving=any(stacks.is_saving for _, stacks in rank_stacks),
    )


def stopped_slots(
    ranks: Sequence[Process], board: RankBoard, pids_of_task: set[int], *, has_own_namespace: bool
) -> frozenset[int]:
    """Return the slots of ranks that a signal stopped, from one cheap look.

    A process that a rank started does not count, because it may be stopped for reasons of its own.
    """
    stopped = tree.stopped_by_signal(pids_of_task)
    if not stopped:
        return frozenset()
    beats = {process.slot: board.heartbeat(process.slot) for process in ranks}
    pids = host_pids((beat.pid for beat in beats.values()), stopped, has_own_namespace=has_own_namespace)
    return frozenset(slot for slot, beat in beats.items() if beat.pid in pids)


def _culprits(
    rank_stacks: Sequence[tuple[Process, RankStacks]], heartbeats: dict[int, Heartbeat]
) -> tuple[Process, ...]:
    """Return the culprits, the oldest sign of life first. If stacks are missing, all ranks are returned."""
    busy = [process for process, stacks in rank_stacks if stacks.frame and not stacks.is_waiting]
    is_clear = all(stacks.frame for _, stacks in rank_stacks) and 0 < len(busy) < len(rank_stacks)
    suspects = busy if is_clear else [process for process, _ in rank_stacks]
    return tuple(
        sorted(suspects, key=lambda process: (heartbeats[process.slot].step, heartbeats[process.slot].at_ns))
    )
