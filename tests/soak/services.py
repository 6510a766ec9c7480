"""`python -m tests.soak.services --faults 60`: a service under load and under fire, in a drawn order.

Counts every request sent and every answer that was whole and right. What may fail are streams that a replica
had begun when it was killed; nothing else may.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.support.faults.service_faults import FAULTS, ServiceUnderFire
from tests.support.planes.real import RealPlane
from tests.support.serving.service import ServedApp, get, post_with_key, stream

CALLERS = (get, get, get, post_with_key, post_with_key, stream, stream, stream)


def soak(root: Path, faults: int, seed: int) -> dict[str, int]:
    """Every fault about as often as every other; returns the counts."""
    dice = random.Random(f"services/{seed}")
    due = [FAULTS[number % len(FAULTS)] for number in range(faults)]
    dice.shuffle(due)
    done: Counter[str] = Counter()
    began = time.monotonic()
    plane = RealPlane(root / "home", "--serve-on", "127.0.0.1:0", "--serve-processes", "2", demo="2x4")
    (root / "hello").mkdir()
    try:
        plane.up()
        fire = ServiceUnderFire(ServedApp(plane, root / "hello"), dice=dice)
        with fire.start_callers(*CALLERS) as crowd:
            for fault in due:
                crowd.wait_for_more(dice.randint(1, 3))
                fault(fire)
                done[fault.__name__.replace("_", " ")] += 1
                print(f"  {done.total()} of {faults}: {fault.__name__.replace('_', ' ')}", flush=True)
            crowd.wait_for_more()
    finally:
        plane.down()
    failed = crowd.failures(except_replicas=frozenset(fire.killed_replicas))
    for what in failed[:10]:
        print(f"  failed: {what}", flush=True)
    return {
        "seconds": round(time.monotonic() - began),
        **{f"done: {what}": count for what, count in sorted(done.items())},
        "requests sent": crowd.num_sent,
        "answered rightly": crowd.num_right,
        "streams lost with their replica": len(crowd.failures()) - len(failed),
        "requests failed": len(failed),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"services under fire: {options.faults} faults, seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="shoal-fire-", ignore_cleanup_errors=True) as scratch:
        found = soak(Path(scratch), options.faults, options.seed)
    width = max(map(len, found))
    for name, count in found.items():
        print(f"{name:{width}}  {count}")
    print(json.dumps(found))
    print("FAILED" if found["requests failed"] else "no request failed")
    return 1 if found["requests failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
