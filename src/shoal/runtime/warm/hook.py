"""What each Python of a rank does first: it is installed as `sitecustomize` in a folder on `PYTHONPATH`.

It makes a launcher that is about to run here the stand-in for it, tells the supervisor which process groups
the program forms, and then loads the `sitecustomize` it stands in front of. It runs in the job's own
interpreter, 3.8 or later (3.9 for MPI), so it imports nothing that an interpreter has not loaded already.
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
WORDS = ("torch", "accelerate", "deepspeed", "/ds ")
"""One of them is in the command line of every launcher. Other processes pay for no more than this look."""
ARGUMENTS = ("backend", "init_method", "timeout", "world_size", "rank", "store")
"""Of torch's `init_process_group`, by position."""
MAX_REPORTS = 16
"""Of one process, but for groups larger than all before: a test suite forms hundreds of small ones."""
_reported: list[tuple[str, int, int]] = []


def report(world: int, member: int, library: str) -> None:
    """Tell the supervisor that this process is number `member` of a process group of `world` processes."""
    rank = os.environ.get("SHOAL_RANK")
    group = os.environ.get("SHOAL_GENERATION", "0")
    told = (group, world, member)
    is_largest = world > max([one[1] for one in _reported if one[0] == group], default=0)
    if rank is None or told in _reported or (len(_reported) >= MAX_REPORTS and not is_largest):
        return
    _reported.append(told)
    # As `fabric run` does, and `elastic_launch`. A launcher that Shoal lets run has left its mark.
    own, run = os.environ.get("SHOAL_ATTEMPT_ID"), os.environ.get("TORCHELASTIC_RUN_ID")
    if run not in (None, own) and "SHOAL_LAUNCHER" not in os.environ:
        library = "other-launcher"
    # The same number in all members of one group, whatever smaller groups some of them formed before.
    number = sum(one[:2] == (group, world) for one in _reported)
    formed = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{number}"
    try:
        fd = os.open(os.path.join(FOLDER, "worlds"), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(fd, f"{rank} {group} {world} {member} {formed} {library}\n".encode())
        finally:
            os.close(fd)
    except OSError:
        # The program has removed the folder, or the disk is full: no reason to fail a program that trains.
        return


def _named_as(function: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    for name in ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__"):
        setattr(call, name, getattr(function, name, None))
    call.__wrapped__ = function  # type: ignore[attr-defined]
    return call


def _telling(function: Callable[..., Any], tell: Callable[..., None]) -> Callable[..., Any]:
    """The function, which calls `tell` with its own arguments once it has returned."""

    def call(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        try:
            tell(*arguments)
        except Exception:  # noqa: BLE001 - a library of another version: its program must not fail for us
            return result
        return result

    return _named_as(function, call)


def _enter(given: dict[str, Any]) -> None:
    """Take this rank's place in the job's process group. `RuntimeError`: another of its processes has it."""
    try:
        _part("one_launcher").join(FOLDER, given)
    except RuntimeError:
        raise
    except Exception:  # noqa: BLE001 - the folder is gone, or a library of another version: as in `_telling`
        return


def _one_at_a_time(module: Any) -> None:
    """Have one process of a rank at a time be in the job's process group."""
    initialize, destroy = module.init_process_group, module.destroy_process_group

    def leave_if_out() -> None:
        place = sys.modules.get("shoal_warm.one_launcher")
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


def _watch(module: Any) -> None:
    """Have a module that was just loaded tell which groups it forms. `AttributeError`: it cannot."""

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
        module.init_process_group = _telling(module.init_process_group, torch_formed)
    elif module.__name__ == RPC:
        module.init_rpc = _telling(module.init_rpc, rpc_formed)
    elif module.__name__ == JAX:
        module.State.initialize = _telling(module.State.initialize, jax_formed)
    else:
        module.HorovodBasics.init = _telling(module.HorovodBasics.init, horovod_formed)


class Watch:
    """A finder that finds what the others find, and looks at the watched modules once they are loaded."""

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
            _watch(module)
        except AttributeError:
            return  # a version without this function forms its groups in another way

    try:
        if load is not None:
            loader.exec_module = exec_module
    except AttributeError:
        return  # a loader that takes no attributes: its module is loaded as it is


def command_line() -> list[str]:
    """This process's own words, the interpreter first."""
    words = getattr(sys, "orig_argv", None)
    if words:
        return list(words)
    with open("/proc/self/cmdline", "rb") as file:  # before Python 3.10
        return [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]


def _part(name: str) -> Any:
    """A module that lies beside the stand-ins."""
    lib = os.path.join(FOLDER, "lib")
    sys.path.insert(0, lib)
    try:
        return __import__(f"shoal_warm.{name}", fromlist=["*"])
    finally:
        sys.path.remove(lib)


def become_stand_in() -> None:
    """Become the stand-in if this process is a launcher in a rank. Returns if it is none."""
    if "SHOAL_RANK" not in os.environ or "SHOAL_LAUNCHER" in os.environ:
        return
    words = command_line()
    text = " ".join(words[1:8]) + " "
    if not any(name in text for name in WORDS):
        return
    _part("stand_in").take_over(FOLDER, sys.executable, words)


def go_on() -> None:
    """Load the `sitecustomize` that would have been loaded without us."""
    sys.path[:] = [entry for entry in sys.path if entry != HERE]
    spec = bootstrap_external.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = bootstrap.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def begin() -> None:
    sys.meta_path.insert(0, Watch())
    try:
        become_stand_in()
    except (ImportError, OSError) as error:
        sys.stderr.write(f"shoal: a launcher may run as it is: {error}\n")
    go_on()


if __name__ == "sitecustomize":
    begin()
