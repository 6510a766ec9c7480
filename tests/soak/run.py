"""`python -m tests.soak.run --kills 1000`: the promise, tried for real.

Kills the control plane, its nursery, supervisors, sandboxes, setups and ranks with SIGKILL at random
while people work, then lets everything come to its end and counts what was lost, doubled or left behind.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.soak.audit import audit, broken_promises
from tests.soak.cluster import SoakCluster
from tests.soak.killer import Killer
from tests.soak.load import MixedLoad


def soak(root: Path, kills: int, seed: int) -> dict[str, int]:
    """Kill that many processes under load and return the counts."""
    began = time.monotonic()
    cluster = SoakCluster(root)
    try:
        cluster.wait_ready()
        with MixedLoad(cluster, seed) as load:
            killed = Killer(cluster, random.Random(f"soak/{seed}"), kills).run()
        cluster.wait_ready()
        found = audit(cluster, load)
    finally:
        cluster.close()
    counts = {f"killed: {what}": count for what, count in sorted(killed.items())}
    return {"seconds": round(time.monotonic() - began), **counts, **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="work in this directory and leave it as it is afterwards")
    options = parser.parse_args()
    print(f"soak: {options.kills} kills, seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="shoal-soak-") as scratch:
        root = options.keep or Path(scratch)
        root.mkdir(parents=True, exist_ok=True)
        found = soak(root, options.kills, options.seed)
    width = max(map(len, found))
    for name, count in found.items():
        print(f"{name:{width}}  {count}")
    print(json.dumps(found))
    failed = broken_promises(found)
    print("FAILED: " + ", ".join(failed) if failed else "every promise held")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
