"""Why a task ends, and the message of its outcome. Reads nothing except whether a program is there."""

from __future__ import annotations

import os
import re
import signal

import msgspec

from shoal.runtime.confine.sandbox_view import PRIVATE, is_within
from shoal.runtime.process.output_tail import NO_MPI
from shoal.wire import MAX_OUTCOME_MESSAGE, EndKind, Recovery

_NO_GPU_MEMORY = re.compile(r"OutOfMemoryError: (?:CUDA|HIP) out of memory|CUDA error: out of memory")
"""PyTorch's message. Another start would end the same way."""
_MISSING = re.compile(
    r"^(?:(?:[^:\n]+: (?:line )?\d+: )?([^\s:]+): (?:command )?not found"
    r"|[^:\n]+: line \d+: ([^\s:]+): No such file or directory"
    r"|\S*env: ['\u2018]([^'\u2019\n]+)['\u2019]: No such file or directory)$",
    re.MULTILINE,
)
"""A program that was not found, in the words of bash, dash and env."""
_NO_LIBRARY = re.compile(r"error while loading shared libraries: ([^\s:]+):")
"""The message of the loader, which ends with the same exit code."""
_MPI_REMEDY = (
    "MPI could not begin. Start the program with `mpirun PROGRAM` in `run`, without a path before `mpirun` "
    "and with the one of its own MPI (`mpirun.openmpi`, `mpirun.mpich`): a rank that begins MPI in another "
    "way would be a world of its own, and is refused"
)
_INSTEAD = {"python": "; say `python3`, or name an environment's by its path: `/DIR/bin/python`"}
"""Debian has no `python` by default."""
_NO_SHOAL = re.compile(r"^ModuleNotFoundError: No module named 'shoal(?:\.\w+)*'$", re.MULTILINE)
NOT_FOUND = 127
NOT_EXECUTABLE = 126
BY_SIGNAL = 128
"""Shells, and many programs, add this to the number of the signal that ended a program to get an exit
code.
"""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """The first reason to end. Later reasons can only make the end faster."""

    kind: EndKind
    message: str = ""
    grace_s: float = 0.0
    """How long ranks may take after SIGTERM to end by themselves."""
    exit_code: int | None = None
    signal: int | None = None
    rank: int | None = None
    is_hang: bool = False
    """Ranks made no step, and were killed, or wait for a rank of another node."""
    is_external_stop: bool = False
    """A signal came from outside of Shoal."""


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """Why a group ended whose ranks made no step."""

    description: str
    rank: int | None = None
    """The rank that held up the others; None if no rank of this node did."""
    frame: str = ""
    """The innermost frame of that rank; empty if it is not known."""


SUCCEEDED = Ending(kind=EndKind.SUCCEEDED)


def of_rank(
    rank: int,
    status: int,
    *,
    is_out_of_memory: bool,
    grace_s: float,
    output_tail: str = "",
    is_alone: bool = False,
) -> Ending:
    """Return the ending for a rank that failed. `status` is from `waitpid`.

    `is_alone`: it is the only rank of its job, and may start MPI in any way.
    """
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = None if number is not None else os.waitstatus_to_exitcode(status)
    kind = EndKind.EXITED if number is None else EndKind.SIGNALED
    how = f"rank {rank} {describe(status, output_tail)}"
    if kind is EndKind.EXITED and not is_alone and NO_MPI.search(output_tail):
        how = f"{how}: {_MPI_REMEDY}"
    if is_out_of_memory:
        kind = EndKind.OUT_OF_MEMORY
        how = f"rank {rank} ran out of memory: the limit was hit and the kernel killed a process ({how})"
    return Ending(kind=kind, message=how, grace_s=grace_s, exit_code=code, signal=number, rank=rank)


def is_by_signal(end: Ending, signum: signal.Signals) -> bool:
    """Whether this signal ended the process, or was sent to it or to what its shell had started."""
    return end.signal == signum or end.exit_code == BY_SIGNAL + signum


def of_device(end: Ending, output_tail: str) -> Ending:
    """Return the same ending, unless the rank's last output says that a GPU ran out of memory."""
    if end.kind is not EndKind.EXITED or _NO_GPU_MEMORY.search(output_tail) is None:
        return end
    message = f"rank {end.rank} ran out of GPU memory ({end.message})"
    return msgspec.structs.replace(end, kind=EndKind.OUT_OF_MEMORY, message=message)


def of_hang(end: Ending, hang: Hang) -> Ending:
    """Return the ending for a rank that was killed because no rank made a step."""
    where = f"; it stood in {hang.frame}" if hang.frame else ""
    message = f"rank {hang.rank} hung and was killed: {hang.description}{where}"
    return msgspec.structs.replace(end, rank=hang.rank, message=message, is_hang=True)


def of_endless_hang(hang: Hang, grace_s: float) -> Ending:
    """Return the ending for a rank that was killed because no rank made a step, and does not die."""
    killed = Ending(kind=EndKind.SIGNALED, grace_s=grace_s, signal=signal.SIGKILL)
    end = of_hang(killed, hang)
    return msgspec.structs.replace(end, message=f"{end.message}; its process does not die")


def of_hang_elsewhere(hang: Hang, grace_s: float) -> Ending:
    """Return the ending for a group that waits for a rank of another node. No rank was killed."""
    message = f"all ranks here wait for one of another node: {hang.description}"
    return Ending(kind=EndKind.SIGNALED, message=message, grace_s=grace_s, is_hang=True)


def describe_recovery(recovery: Recovery) -> str:
    """Describe a recovery in one line of the log."""
    lived = "1 rank lived" if recovery.surviving_ranks == 1 else f"{recovery.surviving_ranks} ranks lived"
    how = f"{lived} on, {recovery.spare_ranks} {'was' if recovery.spare_ranks == 1 else 'were'} waiting"
    if recovery.stepped_s is None:
        return f"group {recovery.rendezvous_round} started {recovery.formed_s:.2f} s after the failure: {how}"
    if recovery.steps_lost is None:
        went_on = f"step {recovery.first_step} was made {recovery.stepped_s:.2f} s after the start"
        return f"group {recovery.rendezvous_round}: {went_on}"
    return (
        f"group {recovery.rendezvous_round} made its first step {recovery.stepped_s:.2f} "
        "s after the failure, "
        f"{recovery.steps_lost} {'step' if recovery.steps_lost == 1 else 'steps'} lost: {how}"
    )


def of_setup(step: str, status: int, output_tail: str = "") -> Ending:
    """Return the ending for a task whose ranks were never started."""
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = None if number is not None else os.waitstatus_to_exitcode(status)
    message = f"{step} {describe(status, output_tail)}"
    return Ending(kind=EndKind.SETUP_FAILED, message=message, exit_code=code, signal=number)


def describe(status: int, output_tail: str = "") -> str:
    """Describe an exit: `exited with code 3`, `was killed by signal 11 (SIGSEGV)`.

    A program that the shell did not find is named if the process's last output names it.
    """
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"was killed by signal {number} ({signal_name(number)})"
    code = os.waitstatus_to_exitcode(status)
    return f"exited with code {code}{_meaning(code, output_tail)}"


def _meaning(code: int, output_tail: str) -> str:
    """Explain a shell's exit code. Above 128 it stands for the signal that killed the shell's program."""
    if code == NOT_FOUND:
        return _not_found(output_tail)
    if code == NOT_EXECUTABLE:
        return ": program cannot be run"
    if _NO_SHOAL.search(output_tail):
        return (
            ": its Python does not have `shoal`; say `pip install shoal-runtime` in the program's "
            "environment, or `pip install ./packages/runtime` from a clone of Shoal"
        )
    number = code - BY_SIGNAL
    is_named = number in set(signal.Signals)
    return f", as after signal {number} ({signal_name(number)})" if is_named else ""


def _not_found(output_tail: str) -> str:
    if libraries := _NO_LIBRARY.findall(output_tail):
        return f": shared library `{libraries[-1]}` not found"
    named = ["".join(groups) for groups in _MISSING.findall(output_tail)]
    if not named:
        return ": program not found"
    return f": program `{named[-1]}` not found{_INSTEAD.get(named[-1], '') or _hidden(named[-1])}"


def _hidden(program: str) -> str:
    """Say why a job does not see a program that the node has; empty if that is not the reason."""
    top = next((top for top in PRIVATE if is_within(program, top)), None)
    if top is None or not os.path.lexists(program):
        return ""
    return (
        f"; the node has it, but the {top} of a job is its own: move it elsewhere, have its environment "
        "active when `shoal up` is typed, or mount it (`mounts: [DIR:DIR:ro]`)"
    )


def signal_name(number: int) -> str:
    """Return `SIGKILL` and the like. Real-time signals have only numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def outcome_message(message: str, output_tail: str) -> str:
    """Join the message and the process's last output, cut to what an outcome may hold."""
    text = f"{message}\n{output_tail}" if output_tail else message
    return text if len(text) <= MAX_OUTCOME_MESSAGE else text[: MAX_OUTCOME_MESSAGE - 1] + "…"
