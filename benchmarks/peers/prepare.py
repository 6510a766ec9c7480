"""Before anything is measured: download what must be downloaded, then leave the network."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import private_network
from benchmarks.peers import ray
from benchmarks.processes import BenchmarkError


def prepare(systems: Sequence[str]) -> None:
    """Call once, before anything else. Without root the machine's network stays, and Ray refuses to start."""
    try:
        if "ray" in systems:
            ray.install()
        private_network.enter()
    except BenchmarkError as error:
        print(f"note: {error}", file=sys.stderr)
