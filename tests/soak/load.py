"""Mixed load: people who submit, cancel, drain and try again, and who repeat a call that was not answered."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable
from typing import Self

from shoal.errors import ShoalError
from tests.soak.cluster import SoakCluster

# The lock is held by rank 0 for as long as it lives: a second attempt at the same time cannot take it.
WITNESS = """\
if [ "$RANK" = 0 ]; then
  exec 9>>"/witness/$SHOAL_JOB_ID"
  flock -n 9 || {{ echo "overlap $SHOAL_ATTEMPT_ID" >> "/witness/$SHOAL_JOB_ID"; exit 3; }}
  echo "start $SHOAL_ATTEMPT_ID $SHOAL_EPOCH" >&9
fi
sleep {seconds} 9>&-
[ "$RANK" != 0 ] || echo "end $SHOAL_ATTEMPT_ID $SHOAL_EPOCH" >&9
"""


class Load:
    """Threads that use the cluster until told to stop. Everything accepted is in `accepted`."""

    def __init__(self, cluster: SoakCluster, seed: int, *, max_open: int = 12) -> None:
        self._cluster = cluster
        self._seed = seed
        self._max_open = max_open
        self.accepted: dict[str, dict[str, object]] = {}
        """By job id: the answer that accepted it."""
        self.refused: list[str] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._live, args=(work, index), daemon=True)
            for index, work in enumerate((self._submit, self._submit, self._meddle))
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(180)

    def _live(self, work: Callable[[random.Random, object], None], index: int) -> None:
        dice = random.Random(f"load/{self._seed}/{index}")
        with self._cluster.client() as shoal:
            while not self._stop.is_set():
                try:
                    work(dice, shoal)
                except ShoalError as error:
                    self.refused.append(f"{error.code}: {error.message}")
                time.sleep(dice.uniform(0.05, 0.4))

    def _submit(self, dice: random.Random, shoal) -> None:
        if (
            len(list(shoal.jobs(status=("queued", "starting", "running", "stopping"), limit=100)))
            >= self._max_open
        ):
            return
        spec = {
            "name": f"soak-{dice.getrandbits(32):08x}",
            "run": WITNESS.format(seconds=round(dice.uniform(0.0, 3.0), 2)),
            "resources": {
                "nodes": dice.choice([1, 1, 1, 2]),
                "gpus": dice.choice([1, 2]),
                "cpus": 1,
                "memory": "256MB",
            },
            "ranks_per_node": dice.choice([1, 2]),
            "mounts": [{"source": str(self._cluster.witness), "target": "/witness"}],
            "retry": {"max": 20, "backoff": "0.2s"},
            "grace": "1s",
            "workdir": None,
        }
        key = uuid.uuid4().hex
        if dice.random() < 0.15:
            answer = shoal.submit_array(**spec, array={"indices": [0, 1, 2], "at_once": 2}, key=key)
            jobs = [job.data for job in answer.jobs]
        else:
            jobs = [shoal.submit(**spec, key=key).data]
        for job in jobs:
            self.accepted[str(job["job_id"])] = job

    def _meddle(self, dice: random.Random, shoal) -> None:
        what = dice.random()
        if what < 0.5 and self.accepted:
            shoal.stop(dice.choice(list(self.accepted)[-10:]))
        elif what < 0.6 and self.accepted:
            shoal.retry(dice.choice(list(self.accepted)))
        elif what < 0.8:
            shoal.drain(f"sim-{dice.randint(1, 4):02d}", "soak")
        else:
            for number in range(1, 5):
                shoal.resume(f"sim-{number:02d}")
