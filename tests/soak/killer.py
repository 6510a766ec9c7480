"""Draws victims until every kind has had its share of the kills."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping

from tests.soak.cluster import SoakCluster

KILL_FRACTIONS: Mapping[str, float] = {
    "control": 0.16,
    "starting control": 0.02,
    "supervisor": 0.22,
    "rank": 0.22,
    "setup": 0.17,
    "sandbox": 0.17,
    "nursery": 0.04,
}
"""Of all kills. `control` answers for a while first, or nothing but recovery would ever be tried."""
PAUSE_S = 0.75
PATIENCE_S = 180.0


class Killer:
    """Kills that many processes of the cluster, in an order drawn from the dice."""

    def __init__(self, cluster: SoakCluster, dice: random.Random, kills: int) -> None:
        self._cluster = cluster
        self._dice = dice
        self._due = [kind for kind, share in KILL_FRACTIONS.items() for _ in range(round(kills * share))]
        self._due += ["rank"] * (kills - len(self._due))
        dice.shuffle(self._due)
        self._rest_s = dice.uniform(1.0, 3.0)
        self.killed: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        """Returns the kills by kind. `AssertionError`: no victim of the kinds left came along for long."""
        told = last = time.monotonic()
        total = len(self._due)
        while self._due:
            if self._kill_next():
                last = time.monotonic()
            assert time.monotonic() - last < PATIENCE_S, f"nobody left to kill: {Counter(self._due)}"
            if time.monotonic() - told > 10:
                told = time.monotonic()
                print(f"  {self.killed.total()} of {total} kills", flush=True)
            time.sleep(self._dice.uniform(0, 2 * PAUSE_S))
        return self.killed

    def _kill_next(self) -> bool:
        """Kill the first in line of whose kind one lives now."""
        victims = self._victims()
        for place, kind in enumerate(self._due):
            if victims[kind] and self._cluster.kill(self._dice.choice(victims[kind])):
                del self._due[place]
                self.killed[kind] += 1
                if kind == "control":
                    self._rest_s = self._dice.uniform(1.0, 3.0)
                return True
        return False

    def _victims(self) -> dict[str, list[int]]:
        found, cluster = self._cluster.find_processes(), self._cluster
        up_s = cluster.up_for_s()
        is_starting = cluster.is_up() and up_s == 0.0
        return {
            "control": [cluster.pid] if up_s > self._rest_s else [],
            "starting control": [cluster.pid] if is_starting else [],
            "supervisor": found.supervisors,
            "rank": found.ranks,
            "setup": found.setups,
            "sandbox": found.sandboxes,
            "nursery": found.fork_servers,
        }
