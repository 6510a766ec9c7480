"""Why a share ends, and how its outcome words it. Looks at nothing but whether a program is there."""

from __future__ import annotations

import os
import re
import signal

import msgspec

from shoal.runtime.confine.view import PRIVATE, is_within
from shoal.runtime.last_words import NO_MPI
from shoal.wire import MAX_OUTCOME_MESSAGE, EndKind, Recovery

_NO_GPU_MEMORY = re.compile(r"OutOfMemoryError: (?:CUDA|HIP) out of memory|CUDA error: out of memory")
"""As PyTorch says it. To start again would end the same way."""
_MISSING = re.compile(
    r"^(?:(?:[^:\n]+: (?:line )?\d+: )?([^\s:]+): (?:command )?not found"
    r"|[^:\n]+: line \d+: ([^\s:]+): No such file or directory"
    r"|\S*env: ['\u2018]([^'\u2019\n]+)['\u2019]: No such file or directory)$",
    re.MULTILINE,
)
"""A program, as bash, dash and env say it."""
_NO_LIBRARY = re.compile(r"error while loading shared libraries: ([^\s:]+):")
"""As the loader says it, which ends with the same code."""
_MPI_REMEDY = (
    "MPI could not begin. Start the program with `mpirun PROGRAM` in `run`, without a path before `mpirun` "
    "and with the one of its own MPI (`mpirun.openmpi`, `mpirun.mpich`): a rank that begins MPI in another "
    "way would be a world of its own, and is refused"
)
_INSTEAD = {"python": "; say `python3`, or name an environment's by its path: `/DIR/bin/python`"}
"""A bare Debian has no `python`."""
_NO_SHOAL = re.compile(r"^ModuleNotFoundError: No module named 'shoal(?:\.\w+)*'$", re.MULTILINE)
NOT_FOUND = 127
NOT_EXECUTABLE = 126
BY_SIGNAL = 128
"""What a shell, and many a program, adds to the number of the signal that ended it, for an exit code."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """The first reason to end; later ones can only make it faster."""

    kind: EndKind
    message: str = ""
    grace_s: float = 0.0
    """How long the ranks may take to end by themselves after SIGTERM."""
    exit_code: int | None = None
    signal: int | None = None
    rank: int | None = None
    is_hang: bool = False
    """Ranks did not move, and were killed, or wait for one of another node."""
    is_unasked: bool = False
    """A signal came that nobody of ours has sent."""


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """Why a group is over whose ranks did not move."""

    told: str
    rank: int | None = None
    """Who held up the others; None: nobody here."""
    place: str = ""
    """Where that rank stood: the innermost frame, empty if nobody knows."""


SUCCEEDED = Ending(kind=EndKind.SUCCEEDED)


def of_rank(
    rank: int,
    status: int,
    *,
    is_out_of_memory: bool,
    grace_s: float,
    last_words: str = "",
    is_alone: bool = False,
) -> Ending:
    """The ending of a rank that did not end well. `status` is `waitpid`'s. `is_alone`: it is its job's only
    one, and may begin MPI as it likes.
    """
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = None if number is not None else os.waitstatus_to_exitcode(status)
    kind = EndKind.EXITED if number is None else EndKind.SIGNALED
    how = f"rank {rank} {describe(status, last_words)}"
    if kind is EndKind.EXITED and not is_alone and NO_MPI.search(last_words):
        how = f"{how}: {_MPI_REMEDY}"
    if is_out_of_memory:
        kind = EndKind.OUT_OF_MEMORY
        how = f"rank {rank} ran out of memory: the limit was hit and the kernel killed a process ({how})"
    return Ending(kind=kind, message=how, grace_s=grace_s, exit_code=code, signal=number, rank=rank)


def is_by(end: Ending, number: signal.Signals) -> bool:
    """Whether a process ended so by this signal, or because it, or what a shell had started, was sent it."""
    return end.signal == number or end.exit_code == BY_SIGNAL + number


def of_device(end: Ending, last_words: str) -> Ending:
    """The same ending, unless the rank's last words say that a GPU had no memory left for it."""
    if end.kind is not EndKind.EXITED or _NO_GPU_MEMORY.search(last_words) is None:
        return end
    told = f"rank {end.rank} ran out of GPU memory ({end.message})"
    return msgspec.structs.replace(end, kind=EndKind.OUT_OF_MEMORY, message=told)


def of_hang(end: Ending, hang: Hang) -> Ending:
    """The ending of a rank that was killed because nothing moved."""
    where = f"; it stood in {hang.place}" if hang.place else ""
    told = f"rank {hang.rank} hung and was killed: {hang.told}{where}"
    return msgspec.structs.replace(end, rank=hang.rank, message=told, is_hang=True)


def of_endless_hang(hang: Hang, grace_s: float) -> Ending:
    """The ending of a rank that was killed because nothing moved, and does not die."""
    killed = Ending(kind=EndKind.SIGNALED, grace_s=grace_s, signal=signal.SIGKILL)
    end = of_hang(killed, hang)
    return msgspec.structs.replace(end, message=f"{end.message}; its process does not die")


def of_hang_elsewhere(hang: Hang, grace_s: float) -> Ending:
    """The ending of a group that waits for somebody who is not on this node. Nobody was killed."""
    told = f"all ranks here wait for one of another node: {hang.told}"
    return Ending(kind=EndKind.SIGNALED, message=told, grace_s=grace_s, is_hang=True)


def recovered(recovery: Recovery) -> str:
    """A recovery in one line of the log."""
    lived = "1 rank lived" if recovery.kept == 1 else f"{recovery.kept} ranks lived"
    how = f"{lived} on, {recovery.spares} {'was' if recovery.spares == 1 else 'were'} waiting"
    if recovery.stepped_s is None:
        return f"group {recovery.generation} started {recovery.formed_s:.2f} s after the failure: {how}"
    if recovery.steps_lost is None:
        went_on = f"step {recovery.first_step} was made {recovery.stepped_s:.2f} s after the start"
        return f"group {recovery.generation}: {went_on}"
    return (
        f"group {recovery.generation} made its first step {recovery.stepped_s:.2f} s after the failure, "
        f"{recovery.steps_lost} {'step' if recovery.steps_lost == 1 else 'steps'} lost: {how}"
    )


def of_setup(what: str, status: int, last_words: str = "") -> Ending:
    """The ending of a share whose ranks were never started."""
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = None if number is not None else os.waitstatus_to_exitcode(status)
    told = f"{what} {describe(status, last_words)}"
    return Ending(kind=EndKind.SETUP_FAILED, message=told, exit_code=code, signal=number)


def describe(status: int, last_words: str = "") -> str:
    """`exited with code 3`, `was killed by signal 11 (SIGSEGV)`. A program that a shell did not find is
    named, as far as the process's last words tell.
    """
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"was killed by signal {number} ({signal_name(number)})"
    code = os.waitstatus_to_exitcode(status)
    return f"exited with code {code}{_meaning(code, last_words)}"


def _meaning(code: int, last_words: str) -> str:
    """What a shell means by its exit code: above 128 it passes on the signal that killed its program."""
    if code == NOT_FOUND:
        return _not_found(last_words)
    if code == NOT_EXECUTABLE:
        return ": program cannot be run"
    if _NO_SHOAL.search(last_words):
        return (
            ": its Python does not have `shoal`; say `pip install shoal-runtime` in the program's "
            "environment, or `pip install ./packages/runtime` from a clone of Shoal"
        )
    number = code - BY_SIGNAL
    known = number in set(signal.Signals)
    return f", as after signal {number} ({signal_name(number)})" if known else ""


def _not_found(last_words: str) -> str:
    if libraries := _NO_LIBRARY.findall(last_words):
        return f": shared library `{libraries[-1]}` not found"
    named = ["".join(found) for found in _MISSING.findall(last_words)]
    if not named:
        return ": program not found"
    return f": program `{named[-1]}` not found{_INSTEAD.get(named[-1], '') or _hidden(named[-1])}"


def _hidden(program: str) -> str:
    """Why a job does not see a program that the node has; empty where that is not why."""
    top = next((top for top in PRIVATE if is_within(program, top)), None)
    if top is None or not os.path.lexists(program):
        return ""
    return (
        f"; the node has it, but the {top} of a job is its own: move it elsewhere, have its environment "
        "active when `shoal up` is typed, or mount it (`mounts: [DIR:DIR:ro]`)"
    )


def signal_name(number: int) -> str:
    """`SIGKILL`; real-time signals have numbers only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shortened(message: str, last_words: str) -> str:
    """The message with the process's last words, no longer than an outcome may hold."""
    text = f"{message}\n{last_words}" if last_words else message
    return text if len(text) <= MAX_OUTCOME_MESSAGE else text[: MAX_OUTCOME_MESSAGE - 1] + "…"
