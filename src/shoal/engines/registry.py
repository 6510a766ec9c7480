"""Engines by name. Imported when asked for: an engine may need what not every machine has."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shoal.clock import Clock
from shoal.engines.base import Engine
from shoal.engines.remote import Reach
from shoal.errors import SpecError

NAMES = ("local", "slurm", "ray")


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
    if name == "slurm":
        return _open_slurm(home, clock, reach, term)
    if name == "ray":
        return _open_ray(home, clock, reach, term)
    if name != "local":
        raise SpecError(f"no engine is called {name!r}; there are {', '.join(NAMES)}", hint="shoal up")
    from shoal.engines.local import LocalEngine, SimulatedNodes

    simulated = SimulatedNodes.parse(demo) if demo else None
    return LocalEngine(home, clock=clock, server_file=server_file, simulated=simulated, term=term)


def _open_slurm(home: Path, clock: Clock, reach: Reach | None, term: int) -> Engine:
    from shoal.engines.slurm import SlurmEngine
    from shoal.engines.slurm.config import load_config

    config = load_config(home)
    if reach is None:
        raise SpecError(
            "nodes of Slurm cannot reach this control plane: it has no address for them",
            hint="`shoal connect slurm --nodes-on ADDRESS:PORT`",
        )
    reach = msgspec.structs.replace(reach, spool=config.spool, shared=config.shared)
    return SlurmEngine(home, clock=clock, reach=reach, config=config, term=term)


def _open_ray(home: Path, clock: Clock, reach: Reach | None, term: int) -> Engine:
    from shoal.engines.ray import RayEngine
    from shoal.engines.ray.config import load_config

    config = load_config(home)
    if reach is None:
        raise SpecError(
            "nodes of Ray cannot reach this control plane: it has no address for them",
            hint="`shoal connect ray --nodes-on ADDRESS:PORT`",
        )
    reach = msgspec.structs.replace(reach, spool=config.spool, shared=config.shared)
    return RayEngine(home, clock=clock, reach=reach, config=config, term=term)
