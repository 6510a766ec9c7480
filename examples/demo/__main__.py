"""The demo's story, act by act. Exit code 0: everything that was killed came back."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

from examples.demo.bill import Kill, Step, print_bill, steps_of
from examples.demo.place import a_stage
from examples.demo.stage import NotSeen, Stage, say, until
from examples.demo.victims import control_plane, log_on_disk, processes_of, rank_process, supervisor
from shoal.client import Shoal

STEPS = 120
FIRST_KILL, SECOND_KILL, THIRD_KILL = 27, 54, 81
"""The training steps at which things are killed; a checkpoint is saved at every tenth."""
AWAY_STEPS = 12
GPUS_PER_NODE = 2
UNREACHABLE = 6
"""The exit code of a command that nobody answered."""
WAITING = "echo rank $RANK of $WORLD_SIZE on $SHOAL_NODE"
NEXT = """\
  export PATH=$PWD/.venv/bin:$PATH           # where `shoal` is
  shoal run -- 'hostname; nproc'             # on this machine; state in ~/.shoal
  shoal down; shoal up --demo 16x8           # and sixteen simulated nodes
  shoal run examples/data_parallel/job.yaml  # kill what you like
  shoal queue --watch                        # in another terminal
  shoal doctor                               # what is missing on this machine
  make soak KILLS=100                        # random kills; counts what was lost"""


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began = time.monotonic()
    try:
        with a_stage() as stage:
            is_whole = play(stage)
            close(stage)
    except KeyboardInterrupt:
        say("\ninterrupted; everything the demo started was stopped and removed")
        return 128 + signal.SIGINT
    except NotSeen as error:
        say(f"\nerror: {error}\nhint: `.venv/bin/shoal doctor` looks at this machine")
        return 1
    say(f"\nThat took {time.monotonic() - began:.0f} s. What to try next:\n\n{NEXT}")
    return 0 if is_whole else 1


def play(stage: Stage) -> bool:
    """True: everything that was accepted succeeded."""
    say("Shoal's demo: four simulated nodes, real programs on them, three kills.")
    say(f"All of it lives in {stage.home.parent} and is removed at the end;")
    say("your own cluster, if you have one, is not touched. About a minute.")
    start(stage)
    with stage.client() as shoal:
        training = submit(stage, shoal)
        look_around(stage, training)
        kills = [
            kill_rank(stage, training),
            kill_supervisor(stage, training),
            kill_control_plane(stage, training),
        ]
        finish(stage, shoal)
        stage.act("What it cost")
        attempts = training.attempts()
        steps = [step for attempt in attempts for step in training.steps(attempt["epoch"])]
        print_bill(kills, steps, attempts, num_gpus=len(attempts[-1]["nodes"]) * GPUS_PER_NODE)
        return count_jobs(shoal, steps)


class Training:
    """The data-parallel job, seen through the SDK."""

    def __init__(self, shoal: Shoal) -> None:
        self._shoal = shoal
        self._job = shoal.job("data-parallel")

    def attempts(self) -> list[dict[str, Any]]:
        """Every attempt at it, oldest first."""
        return list(self._job.refresh().data["attempts"])

    def newest(self) -> tuple[int, str, list[str]]:
        """The newest attempt: its number, its id, its nodes."""
        newest = self._job.refresh().data["attempts"][-1]
        return int(newest["epoch"]), str(newest["attempt_id"]), list(newest["nodes"])

    def steps(self, attempt: int) -> list[Step]:
        return steps_of(list(self._shoal.logs(self._job.job_id, rank=0, attempt=attempt)), attempt)

    def first_after(self, kill: Kill) -> Step | None:
        """The first step of the group that followed in the same attempt."""
        return next((step for step in self.steps(kill.attempt) if step.group > kill.group), None)

    def wait_for_start(self) -> None:
        until(lambda: None if self._job.refresh().status in ("queued", "starting") else True, "a start")

    def wait_for_step(self, number: int) -> None:
        """Until the newest attempt has made step `number` or a later one."""

        def look() -> bool | None:
            steps = self.steps(self.newest()[0])
            if steps and steps[-1].number >= number:
                return True
            if self._job.is_ended:
                raise NotSeen(f"the training {self._job.status} too early: {self._job.because}")
            return None

        until(look, f"step {number} of the training")


def start(stage: Stage) -> None:
    stage.act("Start a cluster")
    say("The nodes and their GPUs are made up; the programs that will run are not.")
    stage.shoal("up", "--demo", f"4x{GPUS_PER_NODE}", "--listen", "127.0.0.1:0")
    stage.shoal("nodes")


def submit(stage: Stage, shoal: Shoal) -> Training:
    stage.act("Give it work")
    gpus = ("--gpus", str(GPUS_PER_NODE), "--ranks-per-node", "1")
    say("A training on two nodes: gradients averaged, a checkpoint every 10 steps.")
    stage.shoal("run", "-d", *gpus, "-e", f"STEPS={STEPS}", "examples/data_parallel/job.yaml")
    say("\nAn array of eight small jobs, at most four at once:")
    stage.shoal("run", "-d", "--gpus", "1", "examples/array/job.yaml")
    say("\nAnd one that needs all four nodes at the same time:")
    stage.shoal("run", "-d", "--name", "all-four", "--nodes", "4", *gpus, "--workdir", "", "--", WAITING)
    return Training(shoal)


def look_around(stage: Stage, training: Training) -> None:
    stage.act("Look at it")
    training.wait_for_start()
    stage.shoal("queue")
    say("\n`all-four` waits. Why?")
    stage.shoal("why", "all-four")
    training.wait_for_step(5)
    say("\nThe training's last lines, each after the rank that wrote it:")
    stage.shoal("logs", "-n", "4", "data-parallel")


def kill_rank(stage: Stage, training: Training) -> Kill:
    stage.act("Kill a rank")
    training.wait_for_step(FIRST_KILL)
    epoch, attempt_id, _ = training.newest()
    rank = until(lambda: rank_process(attempt_id, 1), "the process of rank 1")
    at = stage.kill(rank.pid, f"rank 1 of the training, on {rank.node}")
    say("All its ranks start anew where they are, forked from a process on each node")
    say("that has made their imports, and go on from the last checkpoint.")
    kill = Kill("rank 1", rank.pid, at, epoch)
    first = until(lambda: training.first_after(kill), "the next step of the training")
    say(f"  attempt {epoch} goes on with step {first.number}, {first.at - kill.at:.1f} s after the kill:")
    stage.shoal("events", "--job", "data-parallel", "-n", "2")
    return kill


def kill_supervisor(stage: Stage, training: Training) -> Kill:
    stage.act("Kill a supervisor")
    training.wait_for_step(SECOND_KILL)
    epoch, attempt_id, nodes = training.newest()
    pid = supervisor(stage.home, attempt_id, nodes[0])
    at = stage.kill(pid, f"the supervisor of the training's rank on {nodes[0]}")
    say("Its rank dies with it. That nobody holds its lock any more is the evidence")
    say("that it is dead and not just silent; only then is its share begun anew, and")
    say("the rank of the other node starts anew where it is.")
    kill = Kill("a supervisor", pid, at, epoch, training.steps(epoch)[-1].group)
    first = until(lambda: training.first_after(kill), "the next step of the training")
    say(f"  attempt {epoch} goes on with step {first.number}, {first.at - kill.at:.1f} s after the kill:")
    stage.shoal("events", "--job", "data-parallel", "-n", "3")
    return kill


def kill_control_plane(stage: Stage, training: Training) -> Kill:
    stage.act("Kill the control plane")
    training.wait_for_step(THIRD_KILL)
    epoch, attempt_id, nodes = training.newest()
    pid = control_plane(stage.home)
    at = stage.kill(pid, "the control plane: API, scheduler, database")
    stage.shoal("queue", expect=UNREACHABLE)
    then = last_step_on_disk(stage.home, attempt_id, nodes[0])

    def look() -> int | None:
        now = last_step_on_disk(stage.home, attempt_id, nodes[0])
        return now if now >= then + AWAY_STEPS else None

    now = until(look, "the training to go on by itself")
    say("\nNobody answers, but the training goes on: its log on the node's disk")
    say(f"was at step {then} and is at step {now} now. The next one finds what runs:")
    stage.shoal("up")
    back_at = time.time()
    stage.shoal("why", "data-parallel")
    return Kill("control plane", pid, at, epoch, back_at=back_at)


def last_step_on_disk(home: Path, attempt_id: str, node: str) -> int:
    lines = log_on_disk(home, attempt_id, node).splitlines()
    parsed = [{"at": 0.0, "text": line.split(" ", 3)[-1]} for line in lines]
    return max((step.number for step in steps_of(parsed, 0)), default=0)


def finish(stage: Stage, shoal: Shoal) -> None:
    stage.act("Everything that was accepted comes to its end")
    for job in shoal.jobs():
        shoal.wait(job["job_id"], timeout_s=120)
    stage.shoal("queue", "--all")
    say("\nThe one that waited got its four nodes:")
    stage.shoal("logs", "all-four")
    say("\nAnd the record of it all is whole:")
    stage.shoal("audit", "--verify")


def count_jobs(shoal: Shoal, steps: list[Step]) -> bool:
    jobs = list(shoal.jobs())
    num_succeeded = sum(job["status"] == "succeeded" for job in jobs)
    num_steps = len({step.number for step in steps})
    say(f"\n{len(jobs)} jobs accepted, {num_succeeded} succeeded, {len(jobs) - num_succeeded} lost;")
    num_attempts = steps[-1].attempt
    counted = "1 attempt" if num_attempts == 1 else f"{num_attempts} attempts"
    say(f"{num_steps} of {STEPS} training steps made, in {counted}.")
    return num_succeeded == len(jobs) and num_steps == STEPS


def close(stage: Stage) -> None:
    stage.act("Stop")
    stage.shoal("down", "--jobs")
    until(lambda: None if processes_of(stage.home) else True, "the last process to end")
    say(f"No process of the demo is left, and {stage.home.parent} is removed.")


if __name__ == "__main__":
    sys.exit(main())
