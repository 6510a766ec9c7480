"""The supervisor of one task, the code around its ranks, and the library for training programs.

A task passes through these folders in this order:

- `agent`: on other machines, the node agent fetches the task spec and starts a supervisor.
- `supervisor`: claims the task, prepares it, starts the ranks, watches them and writes the outcome.
- `lease`: renews the lease with the control plane, and learns why to stop.
- `confine`: puts cgroups, a sandbox and a user of its own around the ranks.
- `warm`: starts Python programs and launchers in the ranks without repeating their imports.
- `process`: launches processes, reads their output and counts what they use.
- `files`: the spool, work directories, archives, caches and checkpoint directories.
- `standby`: a supervisor in waiting on each node of several.
- `replica`: probes the server of a service's replica and runs its sidecar.
- `rank`: runs inside a rank: `train`, checkpoints, metrics.

This package is installed on workers without the control plane's dependencies. It imports only leaves, the
standard library and msgspec, and starts fast. It knows no other attempt, and calls no engine and no store.

Programs use `from shoal import runtime`, then `runtime.train`. All public names except `log` need torch,
which is loaded when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.runtime.metrics import log
    from shoal.runtime.rank.checkpoint.checkpoints import Checkpoints
    from shoal.runtime.rank.checkpoint.reading import load_model
    from shoal.runtime.rank.loop import Run, train
    from shoal.runtime.rank.sampler import Sampler

PUBLIC = {
    "Checkpoints": "shoal.runtime.rank.checkpoint.checkpoints",
    "Run": "shoal.runtime.rank.loop",
    "Sampler": "shoal.runtime.rank.sampler",
    "load_model": "shoal.runtime.rank.checkpoint.reading",
    "log": "shoal.runtime.metrics",
    "train": "shoal.runtime.rank.loop",
}
__all__ = ["Checkpoints", "Run", "Sampler", "load_model", "log", "train"]


def __getattr__(name: str) -> object:
    if name not in PUBLIC:
        raise AttributeError(f"module `shoal.runtime` has no attribute `{name}`")
    return getattr(importlib.import_module(PUBLIC[name]), name)
