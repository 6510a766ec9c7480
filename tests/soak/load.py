"""Mixed load: people who submit, cancel, drain and try again, and who repeat a call that was not answered."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

from shoal.client import Shoal
from shoal.errors import ShoalError
from tests.soak.cluster import SoakCluster

# Whoever runs as this rank of this job holds the lock, with every process it started, for as long as it
# lives: a second attempt at the same time cannot take it, nor one that comes before the first is all gone.
WITNESS = """\
exec 9>>"/witness/$SHOAL_JOB_ID.{who}"
flock -n 9 || {{ echo "overlap $SHOAL_ATTEMPT_ID" >&9; exit 3; }}
echo "start $SHOAL_ATTEMPT_ID $SHOAL_EPOCH.$SHOAL_RENDEZVOUS_ROUND" >&9
sleep {seconds}
echo "end $SHOAL_ATTEMPT_ID $SHOAL_EPOCH.$SHOAL_RENDEZVOUS_ROUND" >&9
"""
OPEN = ("queued", "starting", "running", "stopping")
NODES = ("sim-01", "sim-02", "sim-03", "sim-04")


class MixedLoad:
    """Threads that use the cluster until told to stop. Everything accepted is in `accepted`."""

    def __init__(self, cluster: SoakCluster, seed: int, *, max_open: int = 14) -> None:
        self._cluster = cluster
        self._seed = seed
        self._max_open = max_open
        self.accepted: dict[str, int] = {}
        """By job id: how many ranks it has."""
        self.num_answered: Counter[str] = Counter()
        """Commands answered, by verb."""
        self.num_refused: Counter[str] = Counter()
        """Commands refused, by error code."""
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._work_until_stopped, args=(work, index, pause_s), daemon=True)
            for index, (work, pause_s) in enumerate(
                ((self._submit, 0.3), (self._submit, 0.3), (self._change_something, 1.0))
            )
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(180)

    def _work_until_stopped(
        self, action: Callable[[random.Random, Shoal], None], index: int, pause_s: float
    ) -> None:
        dice = random.Random(f"load/{self._seed}/{index}")
        with self._cluster.client() as shoal:
            while not self._stop.is_set():
                try:
                    action(dice, shoal)
                except ShoalError as error:
                    self.num_refused[error.code] += 1
                time.sleep(dice.uniform(0.2, 1.8) * pause_s)

    def _submit(self, dice: random.Random, shoal: Shoal) -> None:
        if len(list(shoal.jobs(status=OPEN, limit=100))) >= self._max_open:
            return
        spec, num_ranks = self._draw_spec(dice)
        key = uuid.uuid4().hex
        if dice.random() < 0.15:
            array = shoal.submit_array(**spec, array={"indices": [0, 1, 2], "at_once": 2}, key=key)
            jobs = array.jobs
        else:
            jobs = [shoal.submit(**spec, key=key)]
        for job in jobs:
            self.accepted[job.job_id] = num_ranks
        self.num_answered["submit"] += 1

    def _draw_spec(self, dice: random.Random) -> tuple[dict[str, Any], int]:
        """A spec, and the number of its ranks."""
        num_nodes, ranks_per_node = dice.choice([1, 1, 1, 2]), dice.choice([1, 1, 2])
        spec: dict[str, Any] = {
            "name": f"soak-{dice.getrandbits(32):08x}",
            "run": WITNESS.format(who="rank-$SHOAL_RANK", seconds=round(dice.uniform(0.2, 3.0), 2)),
            "resources": {"nodes": num_nodes, "gpus": dice.choice([1, 2]), "cpus": 1, "memory": "256MB"},
            "ranks_per_node": ranks_per_node,
            "mounts": [{"source": str(self._cluster.witness), "target": "/witness"}],
            "retry": {"max": 8, "backoff": "0.2s", "on": ["exit", "signal", "setup"]},
            "grace": "1s",
            "workdir": None,
        }
        if dice.random() < 0.4:
            seconds = round(dice.uniform(0.3, 2.0), 2)
            spec["setup"] = WITNESS.format(who="setup-$GROUP_RANK", seconds=seconds)
        return spec, num_nodes * ranks_per_node

    def _change_something(self, dice: random.Random, shoal: Shoal) -> None:
        what = dice.random()
        if what < 0.35:
            if self.accepted:
                shoal.stop(dice.choice(list(self.accepted)[-12:]))
                self.num_answered["stop"] += 1
        elif what < 0.5:
            if self.accepted:
                shoal.retry(dice.choice(list(self.accepted)))
                self.num_answered["retry"] += 1
        elif what < 0.65:
            shoal.drain(dice.choice(NODES), "soak")
            self.num_answered["drain"] += 1
        else:
            for node in NODES:
                shoal.resume(node)
            self.num_answered["resume"] += 1
