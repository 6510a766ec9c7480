"""Become a Python program in a process that was forked for it, as `python` itself would have started it."""

from __future__ import annotations

import ctypes
import importlib
import os
import random
import runpy
import signal
import socket
import sys
import time
import types
from typing import Any

PR_SET_PDEATHSIG = 1
OWN_FRAMES = 2
"""Frames of a traceback that are ours and tell the reader nothing."""
MEET_S, POLL_S = 0.15, 0.002


def settle(request: dict[str, Any], descriptors: list[int]) -> None:
    """Take on what a process of its own would have: session, standard streams, environment, directory."""
    os.setsid()
    # Whoever kills the zygote kills its ranks: nobody else would know of them.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, fd in enumerate(descriptors):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    # Each process would have drawn its own: ranks that share a state would draw the same "random" names.
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    importlib.invalidate_caches()
    _rename([sys.executable, *request["arguments"]])


def let_the_first_go_first() -> None:
    """In a group that begins anew: wait a moment for the first rank to listen, as most do at once.

    A client that comes before it tries again after half a second, which is more than the whole restart takes.
    """
    names = os.environ
    if names.get("SHOAL_GENERATION", "0") == "0" or names.get("RANK", "0") == "0":
        return
    address = (names.get("MASTER_ADDR", ""), int(names.get("MASTER_PORT") or 0))
    until = time.monotonic() + MEET_S
    while time.monotonic() < until:
        try:
            with socket.create_connection(address, timeout=MEET_S):
                return
        except OSError:
            time.sleep(POLL_S)


def _rename(words: list[str]) -> None:
    """Show the program's own words as this process's command line, as far as the zygote's leave room."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    if start:
        text = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def run(arguments: list[str]) -> int:
    """Run `[-u] script ...`, `-m module ...` or `-c code ...` to its end; the exit code, as Python gives it.

    `SystemExit` passes through: whoever called us ends with it.
    """
    words = [word for word in arguments if word != "-u"] if arguments[0] == "-u" else arguments
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    sys.orig_argv = [sys.executable, *arguments]
    try:
        if words[0] == "-m":
            sys.argv, sys.path[:0] = ["-m", *words[2:]], [os.getcwd()]
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]  # noqa: SLF001 - what `-m` calls
        elif words[0] == "-c":
            sys.argv, sys.path[:0] = ["-c", *words[2:]], [""]
            exec(compile(words[1], "<string>", "exec"), main.__dict__)  # noqa: S102
        else:
            _run_script(words, main)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - told as Python tells it, without our frames
        _tell(error)
        return 1
    return 0


def _run_script(words: list[str], main: types.ModuleType) -> None:
    script = words[0]
    sys.argv, sys.path[:0] = words, [os.path.dirname(os.path.realpath(script))]
    main.__file__ = script
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec")
    exec(code, main.__dict__)  # noqa: S102


def _tell(error: BaseException) -> None:
    trace = error.__traceback__
    for _ in range(OWN_FRAMES):
        trace = trace.tb_next if trace is not None and trace.tb_next is not None else trace
    sys.excepthook(type(error), error.with_traceback(trace), trace)
