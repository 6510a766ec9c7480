"""`python -m tests.soak.run --kills 1000`: the promise, tried for real.

Kills the control plane, supervisors and ranks with SIGKILL at random while people work, then lets
everything come to its end and counts what was lost, doubled or left behind. All counts must be 0.
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

from tests.soak.cluster import SoakCluster
from tests.soak.load import Load

SETTLE_S = 300.0


def soak(root: Path, kills: int, seed: int, pause_s: float = 0.25) -> dict[str, int]:
    """Kill that many processes under load and return the counts."""
    dice = random.Random(f"soak/{seed}")
    cluster = SoakCluster(root)
    try:
        cluster.wait_ready()
        with Load(cluster, seed) as load:
            killed = _kill(cluster, dice, kills, pause_s)
        cluster.wait_ready()
        found = _settle(cluster, load)
    finally:
        cluster.close()
    return {**{f"killed {what}": count for what, count in sorted(killed.items())}, **found}


def _kill(cluster: SoakCluster, dice: random.Random, kills: int, pause_s: float) -> Counter[str]:
    killed: Counter[str] = Counter()
    told = time.monotonic()
    while killed.total() < kills:
        cluster.keep_alive()
        what = dice.choices(["control", "supervisor", "rank"], weights=[1, 3, 3])[0]
        pids = {
            "control": cluster.control_pids,
            "supervisor": cluster.supervisor_pids,
            "rank": cluster.rank_pids,
        }[what]()
        if pids:
            cluster.kill(dice.choice(pids))
            killed[what] += 1
        if time.monotonic() - told > 10:
            told = time.monotonic()
            print(f"  {killed.total()} of {kills} kills", flush=True)
        time.sleep(dice.uniform(0, 2 * pause_s))
    return killed


def _settle(cluster: SoakCluster, load: Load) -> dict[str, int]:
    """No more kills: everything accepted must end, and nothing may be left."""
    with cluster.client() as shoal:
        for number in range(1, 5):
            shoal.resume(f"sim-{number:02d}")
        jobs = _wait_for_the_end(cluster, shoal)
        chain = shoal.verify_audit()
    by_id = {str(job["job_id"]): job for job in jobs}
    numbers = Counter(job["number"] for job in jobs)
    left = cluster.leftovers()
    witnessed = [path.read_text() for path in cluster.witness.iterdir()]
    unfinished = [
        job["ref"]
        for job in jobs
        if job["status"] == "succeeded" and "end " not in (cluster.witness / str(job["job_id"])).read_text()
    ]
    for line in left:
        print(f"  left behind: {line}")
    return {
        "control plane starts": cluster.starts,
        "jobs accepted": len(load.accepted),
        "jobs lost": len(set(load.accepted) - set(by_id)),
        "jobs not ended": sum(job["status"] not in ("succeeded", "failed", "cancelled") for job in jobs),
        "succeeded without a trace": len(unfinished),
        "ids reused": sum(count - 1 for count in numbers.values()) + len(jobs) - len(by_id),
        "attempts seen": sum(text.count("start ") for text in witnessed),
        "overlaps": sum(text.count("overlap ") for text in witnessed),
        "orphans": len(left),
        "event log broken": 0 if chain["is_intact"] else 1,
    }


def _wait_for_the_end(cluster: SoakCluster, shoal) -> list[dict[str, object]]:
    deadline = time.monotonic() + SETTLE_S
    while True:
        cluster.keep_alive()
        jobs = list(shoal.jobs())
        is_over = all(job["status"] in ("succeeded", "failed", "cancelled") for job in jobs)
        if (is_over and not cluster.leftovers()) or time.monotonic() > deadline:
            return jobs
        time.sleep(1)


MUST_BE_ZERO = (
    "jobs lost",
    "jobs not ended",
    "succeeded without a trace",
    "ids reused",
    "overlaps",
    "orphans",
    "event log broken",
)


def broken(found: dict[str, int]) -> list[str]:
    """The promises that did not hold."""
    return [name for name in MUST_BE_ZERO if found[name]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"soak: {options.kills} kills, seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="shoal-soak-") as root:
        found = soak(Path(root), options.kills, options.seed)
    width = max(map(len, found))
    for name, count in found.items():
        print(f"{name:{width}}  {count}")
    print(json.dumps(found))
    failed = broken(found)
    print("FAILED: " + ", ".join(failed) if failed else "every promise held")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
