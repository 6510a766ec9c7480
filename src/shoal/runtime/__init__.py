"""Inside a job: the supervisor of one attempt on one node, and what it needs to run ranks.

Lives on workers without the control plane's dependencies: it imports leaves, the standard library and
msgspec, and starts fast. It decides nothing about other attempts and never talks to an engine or a store.

For programs: `from shoal import runtime`, then `runtime.train`. Those names but `log` need torch,
which is loaded when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.runtime.metrics import log
    from shoal.runtime.rank.checkpoint.checkpoints import Checkpoints
    from shoal.runtime.rank.checkpoint.weights import load_model
    from shoal.runtime.rank.loop import Run, train
    from shoal.runtime.rank.sampler import Sampler

PUBLIC = {
    "Checkpoints": "shoal.runtime.rank.checkpoint.checkpoints",
    "Run": "shoal.runtime.rank.loop",
    "Sampler": "shoal.runtime.rank.sampler",
    "load_model": "shoal.runtime.rank.checkpoint.weights",
    "log": "shoal.runtime.metrics",
    "train": "shoal.runtime.rank.loop",
}
__all__ = ["Checkpoints", "Run", "Sampler", "load_model", "log", "train"]


def __getattr__(name: str) -> object:
    if name not in PUBLIC:
        raise AttributeError(f"module `shoal.runtime` has no attribute `{name}`")
    return getattr(importlib.import_module(PUBLIC[name]), name)
