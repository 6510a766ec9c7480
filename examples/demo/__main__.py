"""The demo's story, act by act. Exit code 0: everything that was broken came back."""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

from examples.demo.curve import Mark, Point, plot, points_of, step_at
from examples.demo.place import a_stage
from examples.demo.processes import processes_of
from examples.demo.stage import NotSeen, Stage, say, until
from shoal.client import Shoal

STEPS = 160
FIRST, SECOND, THIRD = 12, 36, 64
"""The training steps at which things are broken; a checkpoint is saved at every tenth."""
PACE = "0.1"
LIMIT = "3m"
"""For the training, which takes half a minute with all its kills: `shoal why` goes by such limits."""
GPUS_PER_NODE = 2
WINDOW = "3s"
WAITING = "echo rank $RANK of $WORLD_SIZE on $SHOAL_NODE"
BROKEN = {
    "kill-rank": ("R", "a rank was killed"),
    "kill-node": ("N", "a node was lost"),
    "kill-control": ("C", "the control plane was killed"),
}
NEXT = """\
  export PATH=$PWD/.venv/bin:$PATH           # where `shoal` is
  shoal run -- 'hostname; nproc'             # on this machine; state in ~/.shoal
  shoal down; shoal up --demo 16x8           # and sixteen simulated nodes
  shoal run examples/language_model/ddp.yaml # break it: `shoal drill --help`
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
    say("Shoal's demo: four simulated nodes, real programs on them, and three bad days.")
    say(f"All of it lives in {stage.home.parent} and is removed at the end;")
    say("your own cluster, if you have one, is not touched. About a minute.")
    start(stage)
    with stage.client() as shoal:
        training = submit(stage, shoal)
        look_around(stage, training)
        kill_rank(stage, training)
        lose_node(stage, training)
        kill_control_plane(stage, training)
        finish(stage, shoal)
        show_cost(stage, shoal, training)
        return count_jobs(shoal, training)


class Training:
    """The language model's job, seen through the SDK."""

    def __init__(self, shoal: Shoal) -> None:
        self._shoal = shoal
        self._job = shoal.job("lm-ddp")

    def attempts(self) -> list[dict[str, Any]]:
        """Every attempt at it, oldest first."""
        return list(self._job.refresh().data["attempts"])

    def points(self, last: int | None = None) -> list[Point]:
        """The steps made so far, of all attempts, or of the `last` log lines of the newest."""
        attempts = [one["epoch"] for one in self.attempts()]
        job_id, chosen = self._job.job_id, attempts if last is None else attempts[-1:]
        logs = (self._shoal.logs(job_id, rank=0, attempt=epoch, tail=last) for epoch in chosen)
        return [point for log in logs for point in points_of(list(log))]

    def wait_for_start(self) -> None:
        until(lambda: None if self._job.refresh().status in ("queued", "starting") else True, "a start")

    def wait_for_step(self, number: int) -> None:
        """Until step `number`, or a later one, was made."""

        def look() -> bool | None:
            points = self.points(last=20)
            if points and points[-1].step >= number:
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
    say("A small language model, trained on two nodes; a checkpoint every 10 steps.")
    variables = ("-e", f"STEPS={STEPS}", "-e", f"PACE_S={PACE}")
    asked = ("--nodes", "2", *gpus, "--time-limit", LIMIT, *variables)
    stage.shoal("run", "-d", *asked, "examples/language_model/ddp.yaml")
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
    stage.shoal("logs", "-n", "4", "lm-ddp")


def kill_rank(stage: Stage, training: Training) -> None:
    stage.act("Kill a rank")
    training.wait_for_step(FIRST)
    say("A process that was waiting takes its place and gets the other rank's weights.")
    stage.shoal("drill", "kill-rank", "lm-ddp", "--window", WINDOW)


def lose_node(stage: Stage, training: Training) -> None:
    stage.act("Lose a node")
    training.wait_for_step(SECOND)
    say("Its supervisor dies with all that it ran; what is lost is found and replaced.")
    stage.shoal("drill", "kill-node", "lm-ddp", "--window", WINDOW)


def kill_control_plane(stage: Stage, training: Training) -> None:
    stage.act("Kill the control plane")
    training.wait_for_step(THIRD)
    say("API, scheduler, database: gone and started again. The training loses no step; goodput says what it")
    say("lost to the restart, which takes its share of this machine's processors.")
    stage.shoal("drill", "kill-control", "--window", WINDOW)
    stage.shoal("why", "lm-ddp")


def finish(stage: Stage, shoal: Shoal) -> None:
    stage.act("Everything that was accepted comes to its end")
    for job in shoal.jobs():
        shoal.wait(job["job_id"], timeout_s=120)
    stage.shoal("queue", "--all")
    say("\nThe one that waited got its four nodes:")
    stage.shoal("logs", "all-four")
    say("\nAnd the record of it all is whole:")
    stage.shoal("audit", "--verify")


def show_cost(stage: Stage, shoal: Shoal, training: Training) -> None:
    stage.act("What it cost")
    stage.shoal("drill", "history")
    points = training.points()
    drills = [(BROKEN[drill["kind"]], drill["started_at"]) for drill in shoal.drills.history()]
    marks = [Mark(sign, step_at(points, at), what) for (sign, what), at in drills]
    say("\nThe loss of every step that was made, those made twice too; it went on falling:\n")
    say(plot(points, marks))


def count_jobs(shoal: Shoal, training: Training) -> bool:
    jobs = list(shoal.jobs())
    num_succeeded = sum(job["status"] == "succeeded" for job in jobs)
    num_steps, num_attempts = len({point.step for point in training.points()}), len(training.attempts())
    say(f"\n{len(jobs)} jobs accepted, {num_succeeded} succeeded, {len(jobs) - num_succeeded} lost;")
    say(f"{num_steps} of {STEPS} training steps made, attempts: {num_attempts}.")
    return num_succeeded == len(jobs) and num_steps == STEPS


def close(stage: Stage) -> None:
    stage.act("Stop")
    stage.shoal("down", "--jobs")
    until(lambda: None if processes_of(stage.home) else True, "the last process to end")
    say(f"No process of the demo is left, and {stage.home.parent} is removed.")


if __name__ == "__main__":
    sys.exit(main())
