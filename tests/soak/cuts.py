"""`python -m tests.soak.cuts --engine ray --cuts 200`: nodes of a real cluster cut off at random at work.

Each of three nodes is cut off from the control plane, from its peers or from both, both ways or one way, for
a moment or until past the fence of what it runs, healed, and cut off again; their cuts overlap. Every rank
bears witness. Afterwards everything accepted must have succeeded, nothing may have run beside itself or its
successor, and nothing that had begun may have ended early but what was cut off past its fence. Needs root.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from shoal.client.handles import JobHandle
from shoal.errors import ShoalError
from tests.support.faults.witness import Witness, since_boot
from tests.support.host.cluster_lab import ClusterLab
from tests.support.planes.cluster_plane import ClusterPlane, cluster_plane
from tests.support.ray import real_ray
from tests.support.slurm import real_slurm

FENCE_S = 60
MAX_OPEN = 5
LONG_CUT_S = (125.0, 160.0)
"""Past the fence and the control plane's margin: what was cut off is replaced."""
SHORT_CUT_S = (0.3, 15.0)
PAUSE_S = (0.5, 8.0)
LONG_SHARE = 0.06
RENEWAL_S = 12.0
"""A renewal that is lost is given up after 10 s; then comes the next."""
CUT_PAST_FENCE_S = FENCE_S - RENEWAL_S
SETTLE_S = 400.0
ENDED = ("succeeded", "failed", "cancelled")
NUM_NODES = 3
WHAT_IS_MISSING = {"slurm": real_slurm.what_is_missing, "ray": real_ray.what_is_missing}
MUST_BE_ZERO = ("jobs not succeeded", "overlaps", "healthy attempts ended", "healthy ranks restarted")


class NodeCut(NamedTuple):
    node: str
    kind: str
    is_one_way: bool
    begin: float
    """Seconds since boot, as the witnesses count."""
    end: float

    @property
    def is_long(self) -> bool:
        return "control" in self.kind and self.end - self.begin > FENCE_S / 2

    def __str__(self) -> str:
        way = ", one way" if self.is_one_way else ""
        return f"{self.node} from {self.kind}{way} for {self.end - self.begin:.1f} s"


class Cutter:
    """Cuts and heals, by a plan that is drawn as it goes."""

    def __init__(self, lab: ClusterLab, dice: random.Random, num_cuts: int) -> None:
        self._lab = lab
        self._dice = dice
        self._num_cuts = num_cuts
        self.cuts: list[NodeCut] = []
        self._due: list[tuple[float, str, NodeCut | None]] = []
        """What comes next, by time: a node's next cut, or (with a cut) its healing."""
        for name in lab.names:
            heapq.heappush(self._due, (since_boot() + dice.uniform(*PAUSE_S), name, None))

    @property
    def is_done(self) -> bool:
        return not self._due

    def turn(self) -> None:
        """Do what is due."""
        while self._due and self._due[0][0] <= since_boot():
            _, node, cut = heapq.heappop(self._due)
            if cut is None:
                self._cut(node)
            else:
                self._lab.heal(node)
                self.cuts.append(cut._replace(end=since_boot()))
                heapq.heappush(self._due, (since_boot() + self._dice.uniform(*PAUSE_S), node, None))

    def heal_all(self) -> None:
        for name in self._lab.names:
            self._lab.heal(name)

    def _cut(self, node: str) -> None:
        if self._num_cuts == 0:
            return
        self._num_cuts -= 1
        kind = self._dice.choice(("the control plane", "its peers", "the control plane and its peers"))
        is_one_way = self._dice.random() < 0.3
        has_long = any(cut is not None and cut.is_long for _, _, cut in self._due)
        is_long = "control" in kind and not has_long and self._dice.random() < LONG_SHARE
        lasts_s = self._dice.uniform(*(LONG_CUT_S if is_long else SHORT_CUT_S))
        begin = since_boot()
        cut = NodeCut(node, kind, is_one_way, begin, begin + lasts_s)
        print(f"  {self._num_cuts} to go: {cut}", flush=True)
        peers = self._lab.others(node) if "peers" in kind else ()
        self._lab.cut(node, peers, from_control="control" in kind, is_one_way=is_one_way)
        heapq.heappush(self._due, (cut.end, node, cut))


class JobSubmitter:
    """Who submit jobs of one node and of two, and let some of them run for long."""

    def __init__(self, plane: ClusterPlane, witness: Witness, dice: random.Random) -> None:
        self._plane = plane
        self._witness = witness
        self._dice = dice
        self.accepted: dict[str, JobHandle] = {}
        self.refused: Counter[str] = Counter()

    def turn(self) -> None:
        """Submit one, if few are open."""
        try:
            still = list(
                self._plane.shoal.jobs(status=("queued", "starting", "running", "stopping"), limit=100)
            )
            if len(still) >= MAX_OPEN:
                return
            num_nodes = self._dice.choice((1, 1, 2))
            job = self._plane.submit(
                **self._witness.job_fields(
                    round(self._dice.choice((3, 10, 30, 90)) * self._dice.uniform(0.5, 1.5), 1)
                ),
                resources={"nodes": num_nodes, "cpus": 1},
                fence=f"{FENCE_S}s",
                grace="2s",
                retry={"max": 8, "backoff": "0.2s", "on": ["exit", "signal", "setup"]},
            )
            self.accepted[job.job_id] = job
        except ShoalError as error:
            self.refused[error.code] += 1


def open_lab(engine: str, root: Path) -> AbstractContextManager[ClusterLab]:
    root.mkdir(parents=True, exist_ok=True)
    if engine == "ray":
        return real_ray.ray_lab(root, NUM_NODES)
    shape = real_slurm.SlurmShape(nodes=NUM_NODES, slurmd_timeout_s=300)
    return real_slurm.slurm_lab(root, shape)


def soak(engine: str, root: Path, num_cuts: int, seed: int) -> dict[str, int]:
    """Make that many cuts under load; returns the counts."""
    began = time.monotonic()
    with (
        open_lab(engine, root / engine) as lab,
        cluster_plane(root / "plane" / "home", lab) as plane,
        lab.restarting_daemons(),
    ):
        witness = plane.witness
        people = JobSubmitter(plane, witness, random.Random(f"people/{seed}"))
        cutter = Cutter(lab, random.Random(f"cuts/{seed}"), num_cuts)
        try:
            while not cutter.is_done:
                cutter.turn()
                people.turn()
                time.sleep(0.2)
        finally:
            cutter.heal_all()
        found = audit(plane, witness, people, cutter.cuts)
    kinds = Counter(cut.kind for cut in cutter.cuts)
    return {
        "seconds": round(time.monotonic() - began),
        "cuts": len(cutter.cuts),
        **{f"cuts from {kind}": count for kind, count in sorted(kinds.items())},
        "cuts one way": sum(cut.is_one_way for cut in cutter.cuts),
        "cuts past the fence": sum(cut.is_long for cut in cutter.cuts),
        **found,
    }


def audit(plane: ClusterPlane, witness: Witness, people: JobSubmitter, cuts: list[NodeCut]) -> dict[str, int]:
    """No more cuts: everything accepted must end, and bear out what was promised."""
    deadline = time.monotonic() + SETTLE_S
    jobs = list(people.accepted.values())
    while any(job.refresh().status not in ENDED for job in jobs) and time.monotonic() < deadline:
        time.sleep(1)
    attempts = [(job, attempt) for job in jobs for attempt in job.data["attempts"]]
    lines = {job.job_id: witness.lines(job.job_id, "start") for job in jobs}
    unwell: dict[str, list[str]] = {name: [] for name in MUST_BE_ZERO}
    for job in jobs:
        if job.status != "succeeded":
            unwell["jobs not succeeded"].append(f"{job.ref} {job.status} {job.data['attempts'][-1]}")
        unwell["overlaps"] += [f"{job.ref} {told}" for told in witness.overlaps(job.job_id)]
    for job, attempt in attempts:
        starts = [line for line in lines[job.job_id] if line.attempt_id == attempt["attempt_id"]]
        if is_cut_past_fence(cuts, {line.node for line in starts}, attempt):
            continue
        ranks = {line.rank for line in starts}
        if attempt["reason"] != "succeeded" and len(ranks) == len(attempt["nodes"]) > 0:
            unwell["healthy attempts ended"].append(f"{job.ref} {attempt}")
        if any(line.rendezvous_round for line in starts):
            unwell["healthy ranks restarted"].append(f"{job.ref} {attempt}")
    for name, things in unwell.items():
        for thing in things[:10]:
            print(f"  {name}: {thing}", flush=True)
    reasons = Counter(str(attempt["reason"]) for _, attempt in attempts)
    return {
        "jobs accepted": len(jobs),
        "attempts": len(attempts),
        **{f"attempts {reason}": count for reason, count in sorted(reasons.items())},
        "ranks begun": sum(map(len, lines.values())),
        **{f"submissions refused: {code}": count for code, count in sorted(people.refused.items())},
        **{name: len(things) for name, things in unwell.items()},
    }


def is_cut_past_fence(cuts: list[NodeCut], nodes: set[str], attempt: dict[str, Any]) -> bool:
    """Whether one of its nodes was cut off from the control plane past the fence while it ran."""
    ago_s = time.time() - since_boot()
    begin, end = (attempt["placed_at"] or 0.0) - ago_s, (attempt["ended_at"] or time.time()) - ago_s
    spans = [span for node in nodes | set(attempt["nodes"]) for span in silent_spans(cuts, node)]
    return any(first < end and last > begin for first, last in spans if last - first > CUT_PAST_FENCE_S)


def silent_spans(cuts: list[NodeCut], node: str) -> list[tuple[float, float]]:
    """When nobody heard of the node: its cuts from the control plane, joined over pauses in which a renewal
    may not have come through.
    """
    found: list[tuple[float, float]] = []
    for cut in sorted((c for c in cuts if c.node == node and "control" in c.kind), key=lambda cut: cut.begin):
        if found and cut.begin - found[-1][1] < RENEWAL_S:
            found[-1] = found[-1][0], cut.end
        else:
            found.append((cut.begin, cut.end))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=tuple(WHAT_IS_MISSING), default="slurm")
    parser.add_argument("--cuts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="work in this directory and leave it as it is afterwards")
    options = parser.parse_args()
    missing = WHAT_IS_MISSING[options.engine]()
    if missing is not None:
        print(f"skipped: {missing}")
        return 0
    print(f"cuts: {options.cuts} of three nodes of {options.engine}, seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="shoal-cuts-", ignore_cleanup_errors=True) as scratch:
        root = options.keep or Path(scratch)
        root.mkdir(parents=True, exist_ok=True)
        root.chmod(0o755)
        found = soak(options.engine, root, options.cuts, options.seed)
    width = max(map(len, found))
    for name, count in found.items():
        print(f"{name:{width}}  {count}")
    print(json.dumps(found))
    failed = [name for name in MUST_BE_ZERO if found[name]]
    print("FAILED: " + ", ".join(failed) if failed else "every promise held")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
