"""Find what a program imports without running it, and run a program in a forked process.

`imported_by` reads the imports from the source. `run` starts the program exactly as `python` would.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import importlib
import importlib.machinery
import os
import random
import runpy
import signal
import socket
import sys
import time
import types
from typing import Any

MAX_FILES = 200
MAX_BYTES = 1 << 20
NEVER_EARLY = ("mpi4py",)
"""Packages that initialize MPI on import. A process forked after that could not initialize its own MPI."""


def imported_by(script: str) -> list[str]:
    """Return the third-party modules that the script, and the modules beside it, import on load.

    The modules beside the script are parsed and not returned, because importing them would run the program.
    Unreadable files are skipped.
    """
    root = os.path.dirname(os.path.abspath(script))
    waiting = [os.path.abspath(script)]
    seen: set[str] = set()
    names: dict[str, None] = {}
    while waiting and len(seen) < MAX_FILES:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in _imported(path):
            own_file = _own_module(root, name)
            if own_file is None:
                names[name] = None
            else:
                waiting.append(own_file)
    return list(names)


def preload(names: list[str]) -> None:
    """Import these modules if possible. A module that fails here fails again, with a message, in the rank."""
    for name in names:
        if name.partition(".")[0] in NEVER_EARLY:
            continue
        with contextlib.suppress(Exception):
            importlib.import_module(name)


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


class ImportRecorder:
    """A finder that finds nothing and records what was searched: the unforeseen imports."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        with contextlib.suppress(OSError):
            os.write(self._fd, name.encode() + b"\n")


def record_imports(path: str) -> None:
    """Record every new import of this process in the file from now on."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    sys.meta_path.insert(0, ImportRecorder(fd))


def _imported(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read(MAX_BYTES))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    names: list[str] = []
    for node in _at_load(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def _at_load(tree: ast.AST) -> list[ast.stmt]:
    """Return the statements that run when the module is loaded, so not those inside functions."""
    statements: list[ast.stmt] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.stmt):
            statements.append(node)
        statements += _at_load(node)
    return statements


def _own_module(root: str, name: str) -> str | None:
    """Return the file of a module beside the script. None: the module is not there."""
    below = os.path.join(root, *name.split("."))
    for path in (f"{below}.py", f"{below}/__init__.py"):
        if os.path.isfile(path):
            return path
    top = os.path.join(root, name.partition(".")[0])
    return f"{top}/__init__.py" if os.path.isdir(top) else None


PR_SET_PDEATHSIG = 1
OWN_FRAMES = 2
"""Frames of a traceback that belong to this module and are of no use to the reader."""
FIRST_RANK_S, POLL_S = 0.15, 0.002


def adopt_request(request: dict[str, Any], descriptors: list[int]) -> None:
    """Give this forked process its own session, standard streams, environment and directory."""
    os.setsid()
    # A rank must die with its zygote, because no other process knows about it.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, fd in enumerate(descriptors):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    # Separate processes have separate random states. Ranks with one state would draw the same "random" names.
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
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
    """Run `[-u] script ...`, `-m module ...` or `-c code ...` to its end. Return Python's exit code.

    `SystemExit` passes through and ends the caller.
    """
    argv = [word for word in arguments if word != "-u"] if arguments[0] == "-u" else arguments
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    sys.orig_argv = [sys.executable, *arguments]
    try:
        if argv[0] == "-m":
            sys.argv, sys.path[:0] = ["-m", *argv[2:]], [os.getcwd()]
            runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]  # noqa: SLF001 - what `-m` calls
        elif argv[0] == "-c":
            sys.argv, sys.path[:0] = ["-c", *argv[2:]], [""]
            exec(compile(argv[1], "<string>", "exec"), main.__dict__)  # noqa: S102
        else:
            _run_script(argv, main)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - printed as Python does, without the frames of this module
        _print_error(error)
        return 1
    return 0


def _run_script(argv: list[str], main: types.ModuleType) -> None:
    script = argv[0]
    sys.argv, sys.path[:0] = argv, [os.path.dirname(os.path.realpath(script))]
    main.__file__ = script
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec")
    exec(code, main.__dict__)  # noqa: S102


def _print_error(error: BaseException) -> None:
    trace = error.__traceback__
    for _ in range(OWN_FRAMES):
        trace = trace.tb_next if trace is not None and trace.tb_next is not None else trace
    sys.excepthook(type(error), error.with_traceback(trace), trace)
