"""Engines by name. Imported when asked for: an engine may need what not every machine has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from shoal.clock import Clock
from shoal.engines.base import Engine
from shoal.engines.cluster_id import ClusterId, this_machine
from shoal.engines.reach import Reach
from shoal.errors import SpecError

REMOTE = ("slurm", "ray")
NAMES = ("local", *REMOTE)


def open_engine(
    name: str,
    *,
    home: Path,
    clock: Clock,
    server_file: Path,
    demo: str | None = None,
    reach: Reach | None = None,
    term: int = 0,
) -> Engine:
    """The engine called `name`. `demo` adds simulated nodes (`16x8`); `SpecError` for a name nobody knows.

    `reach`: how supervisors on other machines find this control plane; None: they cannot. `term`: of the
    control plane that leads; from now on nothing is started by one with an earlier term.
    """
    if name in REMOTE:
        return _open_remote(name, home, clock, reach, term)
    _refuse_unknown(name)
    from shoal.engines.local import LocalEngine, SimulatedNodes

    simulated = SimulatedNodes.parse(demo) if demo else None
    return LocalEngine(home, clock=clock, server_file=server_file, simulated=simulated, term=term)


def cluster_of(name: str, home: Path, *, is_shared: bool) -> ClusterId:
    """Which cluster that engine would hand work to, by what was written down when it was connected. Asks
    nobody. `is_shared`: several control planes have this home's directory. `SpecError`: nobody connected one.
    """
    if name in REMOTE:
        load_config, _ = _remote(name)
        found: ClusterId = load_config(home).cluster_id
        return found
    _refuse_unknown(name)
    return this_machine(is_shared=is_shared)


def _refuse_unknown(name: str) -> None:
    if name not in NAMES:
        raise SpecError(f"no engine is called {name!r}; there are {', '.join(NAMES)}", hint="shoal up")


def _open_remote(name: str, home: Path, clock: Clock, reach: Reach | None, term: int) -> Engine:
    """One of a cluster that somebody connected."""
    load_config, make = _remote(name)
    config = load_config(home)
    if reach is None:
        raise SpecError(
            f"nodes of {name.capitalize()} cannot reach this control plane: it has no address for them",
            hint="connect it again with `--nodes-on ADDRESS:PORT`",
        )
    reach = msgspec.structs.replace(reach, spool=config.spool, shared=config.shared)
    return make(home, clock=clock, reach=reach, config=config, term=term)


def _remote(name: str) -> tuple[Callable[[Path], Any], Callable[..., Engine]]:
    """How what was connected is read, and the engine made of it."""
    if name == "slurm":
        from shoal.engines.slurm import SlurmEngine
        from shoal.engines.slurm.config import load_config as load_slurm

        return load_slurm, SlurmEngine
    from shoal.engines.ray import RayEngine
    from shoal.engines.ray.config import load_config as load_ray

    return load_ray, RayEngine
