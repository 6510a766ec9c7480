"""Seconds from a fault to the next step, steps made again, and runs that never resumed, measured in one run.

    python -m benchmarks.recovery [--trials 5] [--ranks 2,4] [--only spare,tuned] [--faults kill,node,hang]

*Next step* is the first one made by a process that did not exist before the fault: from then on the whole
group works again. The state of a replica is 50 MB, and the plain program saves every tenth step. A contestant
that has not resumed after 90 s counts as never recovered. A `node` is the process that manages half of the
ranks, and those ranks; torchrun continues with the other half, Shoal with all of them. torchft's survivors
make steps while a replica is away, so its seconds are until that replica makes a step.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.measure import table, times
from benchmarks.recovery.runs import CONTESTANTS, TORCHFT, Run, Step

FAULTS = {"kill": "one rank is killed", "node": "one of two nodes is lost", "hang": "one rank is stopped"}
WARM_STEPS = 150
"""About 15 s, after which everything that a contestant keeps ready is ready."""
BETWEEN = 60
"""Steps that all ranks make before the next fault: about 6 s. If a program reports no steps, a group that is
killed sooner counts as one that fails at once, and the third of those as a new attempt."""
PATIENCE_S, START_S = 90.0, 120.0
PEERS = {"kill": "torchrun, tuned", "node": "torchrun", "hang": "torchrun, tuned"}
CANNOT = {"node": ("torchft", "Shoal, cold"), "hang": ("torch", "Shoal, zygote", "Shoal, cold")}
"""torchft has no notion of nodes here, and a lost node's ranks always start cold. A hang is detected by the
steps that a program reports. Otherwise only the process group's own time-out of half an hour detects it."""


@dataclass(frozen=True)
class Trial:
    seconds: float | None
    """None: it never resumed."""
    lost: int


def trials_of(kind: type[Run], ranks: int, fault: str, count: int, between: int = BETWEEN) -> Iterator[Trial]:
    """Inject one fault after the other into a run while it continues. If the run is lost, never recovers or
    shrinks, as torchrun's does without a node, another run follows.
    """
    while count > 0:
        with kind(ranks, nodes=2 if fault == "node" else 1) as run:
            begin(run)
            is_well = True
            while is_well and count > 0:
                trial = hit(run, fault)
                is_well = fault != "node" and trial.seconds is not None and goes_on(run, between)
                yield trial if is_well or fault == "node" else Trial(None, 0)
                count -= 1


def begin(run: Run) -> None:
    """Wait until every rank has made some steps. Raise `RuntimeError` at once if the run has ended before."""
    ended: list[str] = []

    def is_decided() -> bool:
        if all_at(run, WARM_STEPS):
            return True
        ended[:] = filter(None, [run.how_it_ended()])
        return bool(ended)

    wait(is_decided, START_S, "the run did not begin")
    if ended:
        raise RuntimeError(f"the run did not begin: {ended[0]}")


def goes_on(run: Run, between: int) -> bool:
    """Wait until all ranks have made some more steps. False: they do not."""
    goal = max(step.number for step in run.steps()) + between
    try:
        wait(lambda: all_at(run, goal), PATIENCE_S, "")
    except TimeoutError:
        return False
    return True


def hit(run: Run, fault: str) -> Trial:
    """Strike the last rank of a healthy run, and observe how it continues."""
    before = run.steps()
    victim = next(step.pid for step in reversed(before) if step.rank == run.ranks - 1)
    births = {step.born for step in before}
    at = time.time()
    strike(run, run.process_of(victim), fault)
    try:
        wait(lambda: any(step.born not in births for step in run.steps()), PATIENCE_S, "")
    except TimeoutError:
        return Trial(None, 0)
    first = next(step for step in run.steps() if step.born not in births)
    last = max(step.number for step in run.steps() if step.at <= at)
    return Trial(first.at - at, max(0, last - first.number + 1))


def strike(run: Run, pid: int, fault: str) -> None:
    for victim in run.node_of(pid) if fault == "node" else [pid]:
        os.kill(victim, signal.SIGSTOP if fault == "hang" else signal.SIGKILL)


def all_at(run: Run, number: int) -> bool:
    newest: dict[int, Step] = {step.rank: step for step in run.steps()}
    return len(newest) == run.ranks and min(step.number for step in newest.values()) >= number


def wait(is_true: object, timeout_s: float, what: str) -> None:
    assert callable(is_true)
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.01)


def measure(names: list[str], ranks: int, fault: str, trials: int) -> list[list[str]]:
    by_contestant: dict[str, list[Trial]] = {}
    for name in names:
        by_contestant[name] = []
        for trial in trials_of(CONTESTANTS[name], ranks, fault, trials):
            by_contestant[name].append(trial)
            sys.stderr.write(f"{fault}, {ranks} ranks, {name}, {len(by_contestant[name])}: {trial}\n")
    peer = _median(by_contestant.get(PEERS[fault], []))
    return [_row(name, by_contestant[name], peer) for name in names]


def _median(trials: list[Trial]) -> float | None:
    seconds = [trial.seconds for trial in trials if trial.seconds is not None]
    return statistics.median(seconds) if seconds else None


def _row(name: str, trials: list[Trial], peer: float | None) -> list[str]:
    median = _median(trials)
    never = sum(trial.seconds is None for trial in trials)
    lost = [trial.lost for trial in trials if trial.seconds is not None]
    return [
        name,
        "-" if median is None else f"{median:.2f}",
        "-" if median is None or peer is None else times(peer, median),
        "-" if not lost else f"{statistics.median(lost):g}",
        f"{never} of {len(trials)}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--only", default=",".join(CONTESTANTS), help="names of rows, separated by commas")
    parser.add_argument("--faults", default="kill,node,hang")
    options = parser.parse_args()
    if importlib.util.find_spec("torchft") is None:
        sys.stderr.write("torchft is not installed: its row is left out\n")
        del CONTESTANTS[TORCHFT]
    names = [name for name in CONTESTANTS if any(word.strip() in name for word in options.only.split(","))]
    for fault in options.faults.split(","):
        able = [name for name in names if not name.startswith(CANNOT.get(fault, ()))]
        for ranks in map(int, options.ranks.split(",")):
            rows = measure(able, ranks, fault, options.trials)
            title = f"{FAULTS[fault]}, {ranks} ranks, measured, median of {options.trials}"
            head = [
                "",
                "seconds to the next step",
                f"faster than {PEERS[fault]}",
                "steps lost",
                "never went on",
            ]
            sys.stdout.write("\n" + table(title, head, rows) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
