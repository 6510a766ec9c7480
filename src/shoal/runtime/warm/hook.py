"""The start hook of each Python in a rank, installed as `sitecustomize` in a folder on `PYTHONPATH`.

It turns a launcher that is about to run into its stand-in, reports to the supervisor which process groups the
program forms, and then loads the `sitecustomize` that it hides. It runs in the job's own interpreter, 3.8 or
later (3.9 for MPI), so it imports only modules that an interpreter has already loaded.
"""

from __future__ import annotations

import _frozen_importlib as bootstrap
import _frozen_importlib_external as bootstrap_external
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = os.path.dirname(HERE)
TORCH, RPC = "torch.distributed.distributed_c10d", "torch.distributed.rpc"
JAX, HOROVOD = "jax._src.distributed", "horovod.common.basics"
LAUNCHER_MARKS = ("torch", "accelerate", "deepspeed", "/ds ")
"""Every launcher's command line contains one of these. For other processes the hook does nothing else."""
ARGUMENTS = ("backend", "init_method", "timeout", "world_size", "rank", "store")
"""The positional arguments of torch's `init_process_group`."""
MAX_REPORTS = 16
"""Reports of one process, not counting groups larger than all before. A test suite forms hundreds of small
groups."""
_reported: list[tuple[str, int, int]] = []


def report(world: int, member: int, library: str) -> None:
    """Tell the supervisor that this process is number `member` of a process group of `world` processes."""
    rank = os.environ.get("SHOAL_RANK")
    group = os.environ.get("SHOAL_RENDEZVOUS_ROUND", "0")
    formed_group = (group, world, member)
    is_largest = world > max([one[1] for one in _reported if one[0] == group], default=0)
    if rank is None or formed_group in _reported or (len(_reported) >= MAX_REPORTS and not is_largest):
        return
    _reported.append(formed_group)
    # `fabric run` and `elastic_launch` set another run id. A launcher that Shoal lets run has set its mark.
    attempt_id, run = os.environ.get("SHOAL_ATTEMPT_ID"), os.environ.get("TORCHELASTIC_RUN_ID")
    if run not in (None, attempt_id) and "SHOAL_LAUNCHER" not in os.environ:
        library = "other-launcher"
    # All members of one group get the same number, even if some of them formed smaller groups before.
    number = sum(one[:2] == (group, world) for one in _reported)
    formed = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{number}"
    try:
        fd = os.open(os.path.join(FOLDER, "worlds"), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(fd, f"{rank} {group} {world} {member} {formed} {library}\n".encode())
        finally:
            os.close(fd)
    except OSError:
        # The program has removed the folder, or the disk is full. Neither may fail a program that trains.
        return


def _named_as(function: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    for name in ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__"):
        setattr(call, name, getattr(function, name, None))
    call.__wrapped__ = function  # type: ignore[attr-defined]
    return call


def _reporting(function: Callable[..., Any], tell: Callable[..., None]) -> Callable[..., Any]:
    """Wrap the function so that it calls `tell` with its own arguments after it has returned."""

    def call(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        try:
            tell(*arguments)
        except Exception:  # noqa: BLE001 - a library of another version must not make its program fail
            return result
        return result

    return _named_as(function, call)


def _enter(init_arguments: dict[str, Any]) -> None:
    """Lock this rank's place in the job's process group. `RuntimeError`: another of its processes has it."""
    try:
        _part("launcher_lock").join(FOLDER, init_arguments)
    except RuntimeError:
        raise
    except Exception:  # noqa: BLE001 - the folder is gone, or a library of another version: as in `_reporting`
        return


def _one_at_a_time(module: Any) -> None:
    """Allow only one process of a rank at a time in the job's process group."""
    initialize, destroy = module.init_process_group, module.destroy_process_group

    def leave_if_out() -> None:
        place = sys.modules.get("shoal_warm.launcher_lock")
        if place is not None and not module.is_initialized():
            place.leave()

    def enter(*arguments: Any, **named: Any) -> Any:
        if not module.is_initialized():
            _enter({**dict(zip(ARGUMENTS, arguments)), **named})  # noqa: B905 - not in Python 3.8
        try:
            return initialize(*arguments, **named)
        finally:
            leave_if_out()

    def leave(*arguments: Any, **named: Any) -> Any:
        try:
            return destroy(*arguments, **named)
        finally:
            leave_if_out()

    module.init_process_group = _named_as(initialize, enter)
    module.destroy_process_group = _named_as(destroy, leave)


def _instrument(module: Any) -> None:
    """Make a newly loaded module report the groups that it forms. `AttributeError`: it is another version."""

    def torch_formed(*_: Any) -> None:
        report(module.get_world_size(), module.get_rank(), "torch")

    def rpc_formed(*_: Any) -> None:
        agent = module.api._get_current_rpc_agent()  # noqa: SLF001 - there is no public name for it
        report(len(agent.get_worker_infos()), agent.get_worker_info().id, "rpc")

    def jax_formed(state: Any, *_: Any) -> None:
        report(state.num_processes, state.process_id, "jax")

    def horovod_formed(basics: Any, *_: Any) -> None:
        report(basics.size(), basics.rank(), "horovod")

    if module.__name__ == TORCH:
        _one_at_a_time(module)
        module.init_process_group = _reporting(module.init_process_group, torch_formed)
    elif module.__name__ == RPC:
        module.init_rpc = _reporting(module.init_rpc, rpc_formed)
    elif module.__name__ == JAX:
        module.State.initialize = _reporting(module.State.initialize, jax_formed)
    else:
        module.HorovodBasics.init = _reporting(module.HorovodBasics.init, horovod_formed)


class ImportWatcher:
    """A finder that delegates to the other finders and instruments the watched modules after their load."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name not in (TORCH, RPC, JAX, HOROVOD):
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)  # type: ignore[arg-type]
                if spec is not None:
                    _look_after_load(spec.loader)
                    return spec
        return None


def _look_after_load(loader: Any) -> None:
    load = getattr(loader, "exec_module", None)

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        loader.exec_module(module)
        try:
            _instrument(module)
        except AttributeError:
            return  # a version without this function, which forms its groups in another way

    try:
        if load is not None:
            loader.exec_module = exec_module
    except AttributeError:
        return  # the loader accepts no attributes, so its module is not instrumented


def command_line() -> list[str]:
    """Return this process's command line, the interpreter first."""
    argv = getattr(sys, "orig_argv", None)
    if argv:
        return list(argv)
    with open("/proc/self/cmdline", "rb") as file:  # before Python 3.10
        return [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]


def _part(name: str) -> Any:
    """Import a module beside the stand-ins."""
    lib = os.path.join(FOLDER, "lib")
    sys.path.insert(0, lib)
    try:
        return __import__(f"shoal_warm.{name}", fromlist=["*"])
    finally:
        sys.path.remove(lib)


def become_stand_in() -> None:
    """Become the stand-in if this process is a launcher in a rank. Return otherwise."""
    if "SHOAL_RANK" not in os.environ or "SHOAL_LAUNCHER" in os.environ:
        return
    argv = command_line()
    text = " ".join(argv[1:8]) + " "
    if not any(name in text for name in LAUNCHER_MARKS):
        return
    _part("stand_in").take_over(FOLDER, sys.executable, argv)


def load_next_sitecustomize() -> None:
    """Load the `sitecustomize` that Python would have loaded without this hook."""
    sys.path[:] = [entry for entry in sys.path if entry != HERE]
    spec = bootstrap_external.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = bootstrap.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def begin() -> None:
    sys.meta_path.insert(0, ImportWatcher())
    try:
        become_stand_in()
    except (ImportError, OSError) as error:
        sys.stderr.write(f"shoal: a launcher may run as it is: {error}\n")
    load_next_sitecustomize()


if __name__ == "sitecustomize":
    begin()
