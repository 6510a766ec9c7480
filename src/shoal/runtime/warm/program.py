"""Turn a fork of the zygote into a program, and run that as `python` would."""

from __future__ import annotations

import ctypes
import importlib
import importlib.machinery
import os
import runpy
import signal
import socket
import sys
import time
import types
from collections.abc import Callable
from typing import Any

from . import context

PR_SET_PDEATHSIG = 1
FIRST_RANK_S, POLL_S = 0.15, 0.002


def loaded_modules(folder: str) -> dict[str, str]:
    """Return the file of each loaded module, without Shoal's own code in `folder`."""
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    ours = os.path.join(folder, "")
    return {
        name: path
        for name, path in files.items()
        if isinstance(path, str) and name != "__main__" and not path.startswith(ours)
    }


def differing_modules(expected: dict[str, str], folder: str) -> list[str]:
    """Return the modules that are only expected, only loaded, or loaded from another file than expected."""
    loaded = loaded_modules(folder)
    return sorted(name for name in expected.keys() | loaded if expected.get(name) != loaded.get(name))


def take_place(name: str, cwd: str) -> None:
    """Prepare `sys.path` and `__main__` of this process for a program, before its imports are made."""
    if name == "-c":
        folder = ""
    elif name.startswith("-m "):
        folder = cwd
    else:
        folder = os.path.dirname(os.path.realpath(name))
    sys.path.insert(0, folder)
    main = sys.modules["__main__"].__dict__
    for extra in set(main) - set(vars(types.ModuleType("__main__"))) - {"__annotations__", "__builtins__"}:
        del main[extra]
    if name != "-c" and not name.startswith("-m "):
        path = name if sys.version_info >= (3, 9) else os.path.relpath(name, cwd)
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        main.update(__file__=path, __cached__=None, __loader__=loader)


def adopt_request(request: dict[str, Any], descriptors: list[int], changes: dict[str, str | None]) -> None:
    """Give this forked process its own session, standard streams, environment and directory.

    `changes`: the variables that the imports have set, or removed (None).
    """
    os.setsid()
    # A rank must die with its zygote, because no other process knows about it.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, fd in enumerate(descriptors):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.chdir(request["cwd"])
    if "multiprocessing.process" in sys.modules:
        # A standby makes its imports in another directory.
        sys.modules["multiprocessing.process"].ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    # Separate processes have separate random states. Ranks with one state would draw the same "random" names.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    importlib.invalidate_caches()
    _rename([sys.executable, *request["arguments"]])


def wait_for_first_rank() -> None:
    """After a restart, wait up to 0.15 s for rank 0 to listen, which most programs do at once.

    A torch client that connects too early retries after 0.5 s, which is longer than the whole restart.
    """
    names = os.environ
    if names.get("SHOAL_RENDEZVOUS_ROUND", "0") == "0" or names.get("RANK", "0") == "0":
        return
    address = (names.get("MASTER_ADDR", ""), int(names.get("MASTER_PORT") or 0))
    until = time.monotonic() + FIRST_RANK_S
    while time.monotonic() < until:
        try:
            with socket.create_connection(address, timeout=FIRST_RANK_S):
                return
        except OSError:
            time.sleep(POLL_S)


def _rename(argv: list[str]) -> None:
    """Show the program's command line as this process's, cut to the length of the zygote's."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    if start:
        text = b"".join(os.fsencode(word) + b"\0" for word in argv)[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def run(arguments: list[str]) -> int:
    """Run `[-u] script ...`, `-m module ...` or `-c code ...` to its end, after `take_place`. Return 0.

    An exception passes through, so the interpreter itself prints it and chooses the exit code or the signal.
    """
    argv = context.without_unbuffered(arguments)
    main = sys.modules["__main__"].__dict__
    sys.orig_argv = [sys.executable, *arguments]
    try:
        if argv[0] == "-m":
            sys.argv = ["-m", *argv[2:]]
            runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]  # noqa: SLF001 - what `-m` calls
        elif argv[0] == "-c":
            sys.argv = ["-c", *argv[2:]]
            exec(compile(argv[1], "<string>", "exec", dont_inherit=True), main)  # noqa: S102
        else:
            sys.argv = argv
            with open(main["__file__"], "rb") as file:
                code = compile(file.read(), main["__file__"], "exec", dont_inherit=True)
            exec(code, main)  # noqa: S102
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook = _without_own_frames(sys.excepthook)
        raise
    return 0


def _without_own_frames(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `sys.excepthook` to print a traceback without the frames through which the program was run."""
    ours = f"{__package__}."

    def excepthook(kind: Any, error: Any, trace: Any) -> None:
        inner = trace.tb_next if trace is not None else None  # below the zygote's own command
        while inner is not None and inner.tb_frame.f_globals.get("__name__", "").startswith(ours):
            inner = inner.tb_next
        hook(kind, error.with_traceback(inner), inner)

    return excepthook
