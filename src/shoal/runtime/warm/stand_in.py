"""What a rank's script finds as `python` or as a launcher: hands the command to the zygote, ends as it ends.

Anything that a fork cannot give faithfully (another interpreter, options of Python's own, variables that
Python reads before the program) is executed as written.

Every rank that begins anew waits for this program, so it imports next to nothing: `socket`, `signal`, `json`
and the like would double the time it takes.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _socket
import importlib
import os
import sys
import time

from . import launchers, mpirun, one_launcher, options, slurm

LENGTH = STATUS = 4
"""Bytes of the numbers that go before a request, and say how it ended."""
PASSED_ON = (
    _signal.SIGTERM,
    _signal.SIGINT,
    _signal.SIGHUP,
    _signal.SIGQUIT,
    _signal.SIGUSR1,
    _signal.SIGUSR2,
    _signal.SIGCONT,
)
KNOCKS, PAUSE_S = 200, 0.01
EARLY = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "LD_")
"""Variables that are read before, or while, modules are loaded."""


def main(folder: str, name: str, arguments: list[str]) -> None:
    """Become the program that the command `name` starts. Never returns."""
    ours = os.path.join(folder, "bin")
    _stay_in_front(folder)
    path = os.environ.get("PATH", os.defpath)
    if name in slurm.NAMES:
        slurm.become(name, arguments, find(name, path, ours))
    if name in mpirun.NAMES:
        mpirun.become(folder, name, arguments, find(name, path, ours))
    _run(folder, name, arguments, _interpreter(name, path, ours))


def take_over(folder: str, interpreter: str, words: list[str]) -> None:
    """Do what `main` does in a process that has begun to be a launcher. Returns if it is none.

    `words`: its own command line, the interpreter first.
    """
    launcher, _ = launchers.named("python", words[1:])
    if launcher is not None:
        _run(folder, "python", words[1:], interpreter)


def _run(folder: str, name: str, arguments: list[str], real: str | None) -> None:
    if real is None:
        sys.stderr.write(f"{name}: command not found\n")
        os._exit(127)
    launcher, words = launchers.named(name, arguments)
    if launchers.MARK in os.environ:
        launcher = None  # a launcher that was left to itself starts what it likes
    if launcher is None and name in launchers.NAMES:
        _run_script(name, arguments, folder)
    if launcher is not None:
        arguments = _behind(launcher, words, folder, real)
    if (
        mpirun.WORLD not in os.environ
        and is_plain(arguments)
        and known(real, dict(os.environ)) == _zygote(folder)
    ):
        status = ask(folder, arguments)
        if status is not None:
            end_as(status)
    os.execv(real, [real, *arguments])  # noqa: S606


def _behind(launcher: str, words: list[str], folder: str, real: str) -> list[str]:
    """The arguments for `python` of the program behind a launcher, its variables set. May not return."""
    environment = dict(os.environ)
    try:
        command = _command(launcher, words, real)
        variables, in_files = _files(command, folder, real) if command.rest else ({}, {})
        arguments = launchers.program(command, environment, in_files)
        one_launcher.claim(folder, environment, is_real=arguments is None)
    except launchers.Refused as refused:
        launchers.end(refused)
        raise
    if arguments is None:
        told = launchers.real(command, environment)
        os.execve(real, [real, *told], launchers.real_environment(command, environment))  # noqa: S606
    os.environ.update({**launchers.identity(launcher, environment), **variables})
    assert arguments is not None
    return arguments


def _command(launcher: str, words: list[str], python: str) -> options.Command:
    """The launcher's command line, taken apart: by its own parser if it has options that we do not know."""
    try:
        return options.read(launcher, words)
    except options.Unclear as unclear:
        real_parser = importlib.import_module(".real_parser", __package__)
        at = real_parser.program_at(python, launcher, words, unclear.option)
        return options.read(launcher, words, at)


def _files(
    command: options.Command, folder: str, python: str
) -> tuple[dict[str, str], dict[str, launchers.Said]]:
    """What a launcher has from its files: variables for the program, and numbers.

    The modules are loaded here: what they import would cost every other start 10 ms.
    """
    variables: dict[str, str] = {}
    numbers: dict[str, launchers.Said] = {}
    if command.name == "accelerate-launch":
        accelerate = importlib.import_module(".accelerate", __package__)
        variables, numbers = accelerate.settings(python, folder, command)
    elif command.name == "deepspeed":
        numbers = importlib.import_module(".deepspeed_hosts", __package__).numbers(command)
    return variables, numbers


def _run_script(name: str, arguments: list[str], folder: str) -> None:
    """Become a program of that name which is no launcher here, as `accelerate env` is not."""
    script = find(name, os.environ.get("PATH", os.defpath), os.path.join(folder, "bin"))
    if script is None:
        sys.stderr.write(f"{name}: command not found\n")
        os._exit(127)
    os.execv(script, [script, *arguments])  # noqa: S606


def _interpreter(name: str, path: str, ours: str) -> str | None:
    """The Python that would have run the command: that beside it, where it is a script of an environment."""
    if name.startswith("python"):
        return find(name, path, ours)
    script = find(name, path, ours)
    beside = os.path.join(os.path.dirname(script), "python") if script is not None else ""
    if os.access(beside, os.X_OK):
        return beside
    return find("python", path, ours) or find("python3", path, ours)


def _stay_in_front(folder: str) -> None:
    """Put the start hook back where a script has replaced `PYTHONPATH`."""
    hook, told = os.path.join(folder, "hook"), os.environ.get("PYTHONPATH", "")
    if hook not in told.split(":"):
        os.environ["PYTHONPATH"] = f"{hook}:{told}" if told else hook


def find(name: str, path: str, without: str) -> str | None:
    """The program a shell would have found, had it not found us."""
    for entry in path.split(":"):
        candidate = os.path.join(entry, name)
        if entry and entry != without and os.access(candidate, os.X_OK) and os.path.isfile(candidate):
            return candidate
    return None


def known(interpreter: str, environment: dict[str, str]) -> str:
    """What must be the same for a fork to be the same as a start: the interpreter and what it reads early."""
    where = [os.path.realpath(os.path.dirname(interpreter)), os.path.realpath(interpreter)]
    return repr((where, sorted((n, v) for n, v in environment.items() if n.startswith(EARLY))))


def _zygote(folder: str) -> str | None:
    """What the zygote of this node is; None where there is none."""
    try:
        with open(f"{folder}/known", encoding="utf-8") as file:
            return file.read()
    except OSError:
        return None


def is_plain(arguments: list[str]) -> bool:
    """A script, `-m module` or `-c code`, with no option of Python's but `-u`."""
    words = arguments[1:] if arguments[:1] == ["-u"] else arguments
    if words[:1] in (["-m"], ["-c"]):
        return len(words) > 1
    return bool(words) and not words[0].startswith("-") and os.path.isfile(words[0])


def ask(folder: str, arguments: list[str]) -> int | None:
    """Have the zygote run it; how it ended, as `waitpid` says it. None: nothing was started."""
    payload = packed(arguments, os.getcwd(), dict(os.environ))
    door = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        _knock(door, folder)
        for number in PASSED_ON:
            _signal.signal(number, Passing(door))
        streams = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (0, 1, 2))
        rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)
        door.sendmsg([len(payload).to_bytes(LENGTH, "big")], [rights])
        door.sendall(payload)
        return _wait(door) if _said(door) is not None else None
    except OSError:
        return None
    finally:
        door.close()


def packed(arguments: list[str], cwd: str, environment: dict[str, str]) -> bytes:
    """A request. No part of it can have a zero byte in it: the kernel would not have handed it over."""
    words = [
        cwd,
        str(len(arguments)),
        *arguments,
        *(f"{name}={value}" for name, value in environment.items()),
    ]
    return os.fsencode("\0".join(words))


class Passing:
    """Hands a signal on to the rank."""

    def __init__(self, door: _socket.socket) -> None:
        self._door = door

    def __call__(self, number: int, frame: object) -> None:
        try:
            self._door.send(bytes([number]))
        except OSError:
            return  # the rank has ended, and so shall we


def _knock(door: _socket.socket, folder: str) -> None:
    """Connect; the zygote may be on its way, but it opens its door before it does anything else."""
    here = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    path = f"/proc/self/fd/{here}/door"  # by descriptor: the path itself may be too long
    for _ in range(KNOCKS):
        if os.path.exists(path):
            break
        time.sleep(PAUSE_S)
    door.connect(path)
    os.close(here)


def _wait(door: _socket.socket) -> int:
    status = _said(door)
    # Without a word the zygote is gone, and the kernel has killed what it had forked.
    return int(_signal.SIGKILL) if status is None else status


def _said(door: _socket.socket) -> int | None:
    data = b""
    while len(data) < STATUS:
        chunk = door.recv(STATUS - len(data))
        if not chunk:
            return None
        data += chunk
    return int.from_bytes(data, "big", signed=True)


def end_as(status: int) -> None:
    """End with the same exit code or by the same signal. Never returns."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != _signal.SIGKILL:
            _signal.signal(number, _signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))
