"""The stand-in that a rank's script runs as `python` or as a launcher.

It sends the command to the zygote and ends as the forked program ends. If a fork would not be exactly what
the command starts (another program, directory, variable, limit, open file, ...), it executes the command as
written, and leaves word of it for the zygote.

Every restart of a rank waits for this program, so it imports almost nothing. `socket`, `signal` and `json`
would double its start time.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _socket
import importlib
import os
import sys
import time

from . import context, launcher_lock, launchers, mpirun, options, rank_identity, srun

LENGTH = STATUS = 4
"""Bytes of the length before a request, and of the exit status in the reply."""
PASSED_ON = (
    _signal.SIGTERM,
    _signal.SIGINT,
    _signal.SIGHUP,
    _signal.SIGQUIT,
    _signal.SIGUSR1,
    _signal.SIGUSR2,
    _signal.SIGCONT,
)
CONNECT_TRIES, PAUSE_S = 200, 0.01


def main(folder: str, name: str, arguments: list[str]) -> None:
    """Become the program that the command `name` starts. Never returns."""
    ours = os.path.join(folder, "bin")
    _stay_in_front(folder)
    path = os.environ.get("PATH", os.defpath)
    if name in srun.NAMES:
        srun.become(folder, name, arguments, find(name, path, ours))
    if name in mpirun.NAMES:
        mpirun.become(folder, name, arguments, find(name, path, ours))
    _run(folder, name, arguments, _interpreter(name, path, ours))


def take_over(folder: str, interpreter: str, argv: list[str]) -> None:
    """Do the same as `main` in a process that has started as a launcher. Return if it is none.

    `argv`: its own command line, the interpreter first.
    """
    launcher, _ = launchers.recognize("python", argv[1:])
    if launcher is not None:
        _run(folder, "python", argv[1:], interpreter)


def _run(folder: str, name: str, arguments: list[str], real: str | None) -> None:
    if real is None:
        sys.stderr.write(f"{name}: command not found\n")
        os._exit(127)
    launcher, launcher_arguments = launchers.recognize(name, arguments)
    if launchers.MARK in os.environ:
        launcher = None  # inside a real launcher, nested launchers run as they are
    if launcher is None and name in launchers.NAMES:
        _run_script(name, arguments, folder)
    if launcher is not None:
        arguments = _program_behind(launcher, launcher_arguments, folder, real)
    if mpirun.WORLD not in os.environ and is_plain(arguments) and _has_plain_streams():
        status = request_fork(folder, real, arguments)
        if status is not None:
            end_as(status)
    os.execv(real, [real, *arguments])  # noqa: S606


def _program_behind(launcher: str, launcher_arguments: list[str], folder: str, real: str) -> list[str]:
    """Set the program's variables and return the arguments for `python`. May not return."""
    environment = dict(os.environ)
    # Before all else: to ask the real parser, or Accelerate, takes seconds, and `run` may end in that time.
    claim = launcher_lock.LauncherClaim(folder, environment)
    try:
        rank_identity.require(launcher, environment)
        command = _command(launcher, launcher_arguments, real)
        variables, in_files = _from_config(command, folder, real) if command.rest else ({}, {})
        arguments = launchers.program_arguments(command, environment, in_files)
        claim.settle(is_real=arguments is None)
    except launchers.LauncherRefused as refused:
        launchers.exit_refused(refused)
        raise
    if arguments is None:
        real_arguments = launchers.real_launcher_arguments(command, environment)
        os.execve(real, [real, *real_arguments], launchers.real_environment(command, environment))  # noqa: S606
    os.environ.update({**rank_identity.launcher_variables(launcher, environment), **variables})
    assert arguments is not None
    return arguments


def _command(launcher: str, arguments: list[str], python: str) -> options.LauncherCommand:
    """Parse the launcher's command line, with the launcher's own parser if it has unknown options.

    For `--version`, which starts nothing, become the real launcher.
    """
    try:
        return options.read(launcher, arguments)
    except options.UnknownOption as unclear:
        if unclear.option in launchers.QUERIES:
            query = [python, "-m", launchers.MODULE_OF[launcher], unclear.option]
            os.execve(python, query, {**os.environ, launchers.MARK: launcher})  # noqa: S606
        real_parser = importlib.import_module(".launcher_config", __package__)
        at = real_parser.program_at(python, launcher, arguments, unclear.option)
        return options.read(launcher, arguments, at)


def _from_config(
    command: options.LauncherCommand, folder: str, python: str
) -> tuple[dict[str, str], dict[str, launchers.LauncherNumber]]:
    """Return the variables and numbers that a launcher reads from its files.

    The modules are loaded here, because their imports would cost every other start 10 ms.
    """
    variables: dict[str, str] = {}
    numbers: dict[str, launchers.LauncherNumber] = {}
    if command.name == "accelerate-launch":
        accelerate = importlib.import_module(".launcher_config", __package__)
        variables, numbers = accelerate.accelerate_settings(python, folder, command)
    elif command.name == "deepspeed":
        numbers = importlib.import_module(".launcher_config", __package__).deepspeed_counts(command)
    return variables, numbers


def _run_script(name: str, arguments: list[str], folder: str) -> None:
    """Execute the real program for a command that starts no ranks, such as `accelerate env`."""
    script = find(name, os.environ.get("PATH", os.defpath), os.path.join(folder, "bin"))
    if script is None:
        sys.stderr.write(f"{name}: command not found\n")
        os._exit(127)
    os.execv(script, [script, *arguments])  # noqa: S606


def _interpreter(name: str, path: str, ours: str) -> str | None:
    """Return the Python that would have run the command: beside it, for a script of an environment."""
    if name.startswith("python"):
        return find(name, path, ours)
    script = find(name, path, ours)
    beside = os.path.join(os.path.dirname(script), "python") if script is not None else ""
    if os.access(beside, os.X_OK):
        return beside
    return find("python", path, ours) or find("python3", path, ours)


def _stay_in_front(folder: str) -> None:
    """Add the start hook to `PYTHONPATH` again if a script has replaced the variable."""
    hook, python_path = os.path.join(folder, "hook"), os.environ.get("PYTHONPATH", "")
    if hook not in python_path.split(":"):
        os.environ["PYTHONPATH"] = f"{hook}:{python_path}" if python_path else hook


def find(name: str, path: str, without: str) -> str | None:
    """Return the program that a shell would find on `path` if the directory `without` were not there."""
    for entry in path.split(":"):
        candidate = os.path.join(entry, name)
        if entry and entry != without and os.access(candidate, os.X_OK) and os.path.isfile(candidate):
            return candidate
    return None


def is_plain(arguments: list[str]) -> bool:
    """Whether the command is a script, `-m module` or `-c code`, with no option of Python but `-u`.

    A `-u` changes nothing in ranks, because they have `PYTHONUNBUFFERED`.
    """
    has_unbuffered = arguments[:1] == ["-u"] and bool(os.environ.get("PYTHONUNBUFFERED"))
    rest = arguments[1:] if has_unbuffered else arguments
    if rest[:1] in (["-m"], ["-c"]):
        return len(rest) > 1
    return bool(rest) and not rest[0].startswith("-") and os.path.isfile(rest[0])


def _has_plain_streams() -> bool:
    """Whether the standard streams are open and no terminals, as those of the zygote."""
    try:
        for fd in (0, 1, 2):
            os.fstat(fd)
        return not any(map(os.isatty, (0, 1, 2)))
    except OSError:
        return False


def request_fork(folder: str, interpreter: str, arguments: list[str]) -> int | None:
    """Ask the zygote to run it. Return the status as from `waitpid`. None: nothing was started."""
    if not os.path.exists(os.path.join(folder, launchers.WARM)):
        return None
    cwd, environment = os.getcwd(), dict(os.environ)
    payload = pack_request(interpreter, os.getpid(), arguments, cwd, environment)
    name = context.program_name(arguments, cwd)
    door = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        if _known(folder) != context.signature(interpreter, name, cwd, environment):
            _leave_word(folder, payload)
            return None
        _connect(door, folder)
        for number in PASSED_ON:
            _signal.signal(number, SignalForwarder(door))
        streams = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (0, 1, 2))
        rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)
        door.sendmsg([len(payload).to_bytes(LENGTH, "big")], [rights])
        door.sendall(payload)
        if _read_status(door) is not None:
            return _wait(door)
        _leave_word(folder, payload)
    except OSError:
        pass
    finally:
        door.close()
    return None


def pack_request(
    interpreter: str, pid: int, arguments: list[str], cwd: str, environment: dict[str, str]
) -> bytes:
    """Encode a request. No part can contain a zero byte, because the kernel would not have accepted it."""
    parts = [
        interpreter,
        str(pid),
        cwd,
        str(len(arguments)),
        *arguments,
        *(f"{name}={value}" for name, value in environment.items()),
    ]
    return os.fsencode("\0".join(parts))


def _known(folder: str) -> str | None:
    """Return the signature of the starts that the zygote can serve, once the zygote has said it."""
    for _ in range(CONNECT_TRIES):
        try:
            with open(os.path.join(folder, launchers.KNOWN), "rb") as file:
                return os.fsdecode(file.read())
        except FileNotFoundError:
            time.sleep(PAUSE_S)
    return None


def _leave_word(folder: str, payload: bytes) -> None:
    """Leave this start to the zygote, which may become one for it once no rank of its own runs."""
    path = os.path.join(folder, launchers.WANTED)
    with open(f"{path}.{os.getpid()}", "wb") as file:
        file.write(payload)
    os.replace(f"{path}.{os.getpid()}", path)


class SignalForwarder:
    """A signal handler that forwards the signal to the rank."""

    def __init__(self, door: _socket.socket) -> None:
        self._door = door

    def __call__(self, number: int, frame: object) -> None:
        try:
            self._door.send(bytes([number]))
        except OSError:
            return  # the rank has ended, and this process ends next


def _connect(door: _socket.socket, folder: str) -> None:
    """Connect to the zygote. It may still be starting, but it opens its socket before its imports."""
    here = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    path = f"/proc/self/fd/{here}/socket"  # by descriptor: the path itself may be too long
    for _ in range(CONNECT_TRIES):
        if os.path.exists(path):
            break
        time.sleep(PAUSE_S)
    door.connect(path)
    os.close(here)


def _wait(door: _socket.socket) -> int:
    try:
        status = _read_status(door)
    except OSError:
        status = None
    # Without a status the zygote is dead, and the kernel has killed the processes that it had forked.
    return int(_signal.SIGKILL) if status is None else status


def _read_status(door: _socket.socket) -> int | None:
    data = b""
    while len(data) < STATUS:
        chunk = door.recv(STATUS - len(data))
        if not chunk:
            return None
        data += chunk
    return int.from_bytes(data, "big", signed=True)


def end_as(status: int) -> None:
    """End this process with the same exit code or by the same signal. Never returns."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != _signal.SIGKILL:
            _signal.signal(number, _signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))
