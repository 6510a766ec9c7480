"""Opens engines by name. An engine is imported late, because it may need what some machines do not have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from shoal.clock import Clock
from shoal.engines.base import Engine
from shoal.engines.home_records import ClusterId, this_machine
from shoal.engines.remote.connection import ControlPlaneAccess
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
    access: ControlPlaneAccess | None = None,
    term: int = 0,
) -> Engine:
    """Return the engine called `name`. `SpecError`: no engine has this name.

    `demo` adds simulated nodes (`16x8`). `access`: how supervisors on other machines reach this control
    plane; None: they cannot. `term`: of the control plane that leads; from now on, a control plane of an
    earlier term cannot start anything.
    """
    if name in REMOTE:
        return _open_remote(name, home, clock, access, term)
    _refuse_unknown(name)
    from shoal.engines.local import LocalEngine, SimulatedNodes

    simulated = SimulatedNodes.parse(demo) if demo else None
    return LocalEngine(home, clock=clock, server_file=server_file, simulated=simulated, term=term)


def cluster_of(name: str, home: Path, *, is_shared: bool) -> ClusterId:
    """Return the cluster that this engine uses, by the configuration that `shoal connect` wrote.

    Does not query the cluster. `is_shared`: several control planes use this home's directory.
    `SpecError`: no cluster was connected.
    """
    if name in REMOTE:
        load_config, _ = _remote(name)
        cluster_id: ClusterId = load_config(home).cluster_id
        return cluster_id
    _refuse_unknown(name)
    return this_machine(is_shared=is_shared)


def _refuse_unknown(name: str) -> None:
    if name not in NAMES:
        raise SpecError(f"no engine is called {name!r}; there are {', '.join(NAMES)}", hint="shoal up")


def _open_remote(name: str, home: Path, clock: Clock, access: ControlPlaneAccess | None, term: int) -> Engine:
    """Open the engine of a connected cluster."""
    load_config, make = _remote(name)
    config = load_config(home)
    if access is None:
        raise SpecError(
            f"nodes of {name.capitalize()} cannot reach this control plane: it has no address for them",
            hint="connect it again with `--nodes-on ADDRESS:PORT`",
        )
    access = msgspec.structs.replace(access, spool=config.spool, shared=config.shared)
    return make(home, clock=clock, access=access, config=config, term=term)


def _remote(name: str) -> tuple[Callable[[Path], Any], Callable[..., Engine]]:
    """Return the function that loads the configuration of a cluster, and its engine class."""
    if name == "slurm":
        from shoal.engines.slurm import SlurmEngine
        from shoal.engines.slurm.config import load_config as load_slurm

        return load_slurm, SlurmEngine
    from shoal.engines.ray import RayEngine
    from shoal.engines.ray.config import load_config as load_ray

    return load_ray, RayEngine
