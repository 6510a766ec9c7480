"""One job file on every engine: the same commands, the same words, the same weights in the end, and the same
recovery from every fault that `shoal drill` knows, one after the other.

What a person does on a cluster that is not theirs, the same on every one: run, lose something, go on.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from shoal.client.handles import JobHandle
from tests.contract.cluster.partitions import CutOffJob
from tests.style.tree import ROOT
from tests.support.planes.cluster_plane import ClusterPlane
from tests.support.planes.real import RealPlane, until
from tests.support.runtime.tasks import SOURCE
from tests.support.runtime.torchrun import run_undisturbed

FILE, JOB = "examples/language_model/two_nodes.yaml", "lm-two-nodes"
GOLDEN = ROOT / "tests" / "golden" / "engines" / "two_nodes.txt"
STEPS, SAVE_EVERY, WARM_STEPS = 180, 5, 12
PACE = ("-e", f"STEPS={STEPS}", "-e", "PACE_S=0.4", "-e", f"SAVE_EVERY={SAVE_EVERY}")
HERE = ("-e", f"PYTHONPATH={SOURCE}", "-e", "CUDA_VISIBLE_DEVICES=")
"""The tests' own Shoal, and no GPU, though nodes may claim some."""
DRILLS = {
    "kill-node": (JOB,),
    "hang": (JOB,),
    "kill-rank": (JOB,),
    "partition": (JOB, "--for", "2s"),
    "corrupt-checkpoint": (JOB,),
    "kill-control": (),
}
"""Each once, in this order, with its own words. Three of them use up a retry, and the file has three.
The hang comes while the supervisor of the node that was lost is new, and knows little of its pace.
"""
REGROUPED = ("kill-node", "kill-rank", "hang", "corrupt-checkpoint")
FEW, SOME = range(SAVE_EVERY + 1), range(SAVE_EVERY, 3 * SAVE_EVERY)
COSTS = {
    **dict.fromkeys(("kill-node", "kill-rank", "hang"), (FEW, "recovered")),
    "partition": (range(1), "unharmed"),
    # All since the one before the newest; one that was under way may have come too late.
    "corrupt-checkpoint": (SOME, "recovered"),
    # Last: on a busy machine the job may come to its end before the next one answers; nobody asks it then.
    "kill-control": ((0, None), "recovered"),
}
"""The steps that may have to be made again, and what is said of it."""
DRILL_S = 240.0
ASK = """
import json, os, ssl, sys, urllib.error, urllib.request
trust = ssl._create_unverified_context()
for path in sys.argv[1:]:
    url = os.environ["SHOAL_URL"].split(",")[0] + path
    asked = urllib.request.Request(url, headers={"Authorization": "Bearer " + os.environ["SHOAL_TOKEN"]})
    try:
        with urllib.request.urlopen(asked, context=trust) as answer:
            print(answer.status, path, json.load(answer)["job"]["job_id"], flush=True)
    except urllib.error.HTTPError as error:
        print(error.code, path, flush=True)
"""
"""What a rank may do at the API with what it was given, printed."""
_STEP = re.compile(r"\[0\] step +(\d+) of \d+  loss ([0-9.]+)")
_BEGIN = re.compile(r"\[(\d)\] rank \d of 2 begins after step (\d+)")
_WEIGHTS = re.compile(r"weights ([0-9a-f]{16})")


class FollowedRun:
    """`shoal run`, followed by somebody who reads it as it comes."""

    def __init__(self, plane: RealPlane) -> None:
        words = [sys.executable, "-m", "shoal.cli.main", "run", *PACE, *HERE, FILE]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._process = subprocess.Popen(words, env=plane.env, cwd=ROOT, text=True, **pipes)  # type: ignore[call-overload]
        self.lines: list[str] = []
        self.remarks: list[str] = []
        kept = ((self._process.stdout, self.lines), (self._process.stderr, self.remarks))
        self._readers = [threading.Thread(target=self._read, args=one) for one in kept]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(pipe: Any, into: list[str]) -> None:
        into.extend(pipe)  # each as it comes

    def step(self) -> int:
        """The last that was told of."""
        return max((int(step) for step, _ in _STEP.findall("".join(self.lines))), default=0)

    def until_step(self, step: int) -> None:
        told = f"step {step} is made"
        until(lambda: self.step() >= step or self._process.poll() is not None, told, within_s=150.0)
        assert self.step() >= step, (self.lines, self.remarks)

    def end(self, within_s: float = 150.0) -> int:
        code: int = self._process.wait(within_s)
        for reader in self._readers:
            reader.join()
        return code

    def close(self) -> None:
        self._process.kill()
        self.end()
        for pipe in (self._process.stdout, self._process.stderr):
            pipe.close()


@contextmanager
def followed_run(plane: RealPlane) -> Iterator[FollowedRun]:
    run = FollowedRun(plane)
    try:
        yield run
    finally:
        run.close()


class DrilledRun(NamedTuple):
    job: JobHandle
    run_output: str
    """By `shoal run`."""
    drill_output: str
    """By `shoal drill`, each."""
    attempts: list[dict[str, Any]]
    undisturbed_output: str
    """What the same program says under torchrun."""


class SameFileContract:
    """Give it a `plane` fixture, up, with two nodes free that have two GPUs each."""

    @pytest.fixture(scope="class")
    @classmethod
    def is_calm(cls) -> Callable[[], bool]:
        """Whether nobody was lost so lately that the control plane still counts on them."""
        return lambda: True

    @pytest.fixture(scope="class")
    @classmethod
    def story(
        cls, plane: RealPlane, is_calm: Callable[[], bool], tmp_path_factory: pytest.TempPathFactory
    ) -> DrilledRun:
        if importlib.util.find_spec("torch") is None:
            pytest.skip("torch is not installed: pip install 'shoal[train]'")
        said: list[str] = []
        with followed_run(plane) as run:
            run.until_step(WARM_STEPS)
            for drill, words in DRILLS.items():
                until(lambda drill=drill: drill != "kill-control" or is_calm(), "all who run are heard from")  # type: ignore[misc]
                done = plane.command("drill", drill, *words, "--window", "2s", timeout_s=DRILL_S)
                assert done.returncode == 0, (done.stdout, done.stderr, said, run.lines, run.remarks)
                said.append(done.stdout)
            alone = run_undisturbed(
                ROOT / "examples" / "language_model" / "ddp.py",
                tmp_path_factory.mktemp("undisturbed"),
                STEPS=str(STEPS),
                PYTHONPATH=SOURCE,
            )
            code = run.end()
            assert code == 0, (run.lines[-20:], run.remarks)
        job = plane.shoal.job(JOB)
        return DrilledRun(job, "".join(run.lines), "\n".join(said), plane.attempts(job), alone)

    def test_its_words_and_those_of_drills_are_the_same_everywhere(self, story: DrilledRun) -> None:
        text = f"{_normal_run(story.run_output)}\n{_normal_drills(story.drill_output)}"
        if os.environ.get("SHOAL_GOLDEN") == "write":
            GOLDEN.parent.mkdir(exist_ok=True)
            GOLDEN.write_text(text)
        told = difflib.unified_diff(GOLDEN.read_text().splitlines(), text.splitlines(), lineterm="", n=0)
        assert text == GOLDEN.read_text(), "\n".join(told)

    def test_no_step_is_left_out_and_its_weights_are_those_of_a_run_that_lost_nothing(
        self, story: DrilledRun
    ) -> None:
        assert sorted({int(step) for step, _ in _STEP.findall(story.run_output)}) == list(range(1, STEPS + 1))
        assert set(_WEIGHTS.findall(story.run_output)) == set(_WEIGHTS.findall(story.undisturbed_output))
        assert len(set(_WEIGHTS.findall(story.run_output))) == 1

    @pytest.mark.parametrize("kind", DRILLS)
    def test_what_a_fault_costs(self, plane: RealPlane, story: DrilledRun, kind: str) -> None:
        """Few steps, and no attempt."""
        [drill] = [one for one in plane.shoal.drills.history(None, 20) if one["kind"] == kind]
        result = drill["result"]
        steps, outcome = COSTS[kind]
        assert (result["outcome"], result["new_attempts"]) == (outcome, 0), drill
        assert result["steps_lost"] in steps, drill
        told = [f"{name} {result[name]}" for name in ("noticed_s", "stepped_s", "steps_lost", "goodput")]
        print(f"{kind} on {plane.engine_name}: {', '.join(told)}")

    def test_every_fault_of_its_ranks_is_mended_in_the_one_attempt(self, story: DrilledRun) -> None:
        assert [attempt["rendezvous_round"] for attempt in story.attempts] == [len(REGROUPED)]

    def test_training_on_two_nodes_goes_on_after_a_lost_node(self, story: DrilledRun) -> None:
        """From where it was, not from its beginning."""
        reached, later = 0, []
        for line in story.run_output.splitlines():
            if step := _STEP.match(line):
                reached = int(step[1])
            elif (begin := _BEGIN.match(line)) and reached:
                later.append((int(begin[2]), reached))
        assert len(later) >= 2 * len(REGROUPED), "both ranks begin again"
        assert all(reached - max(SOME) <= begin <= reached + 1 for begin, reached in later), later

    def test_what_a_rank_measured_is_seen_by_the_api(self, plane: RealPlane, story: DrilledRun) -> None:
        [curve] = plane.shoal.metrics(story.job.job_id, names=["loss"])["items"]
        shown = {int(step): last for step, last, *_ in curve["points"]}
        losses = {int(step): float(loss) for step, loss in _STEP.findall(story.run_output)}
        assert max(shown) == STEPS - 1, "its steps count from 0"
        assert shown[STEPS - 1] == pytest.approx(losses[STEPS], abs=1e-3)

    def test_a_rank_reads_its_own_job_with_its_token_and_nothing_else(
        self, plane: RealPlane, story: DrilledRun
    ) -> None:
        asked = [f"/v1/jobs/{story.job.job_id}", "/v1/jobs", "/v1/nodes", "/v1/users", "/v1/self"]
        job = plane.submit(shlex.join(["exec", "python", "-c", ASK, *asked]), resources={"cpus": 1})
        plane.until_status(job, "succeeded", "failed")
        own = f"200 /v1/self {job.job_id}"
        until(lambda: own in _log_of(plane, job), "it read its own job")
        others = [line for line in _log_of(plane, job) if line != own]
        assert [line.split()[1] for line in others] == asked[:-1]
        assert {line.split()[0] for line in others} <= {"401", "403", "404"}, others


def _log_of(plane: RealPlane, job: JobHandle) -> list[str]:
    return [line["text"] for line in plane.shoal.logs(job.job_id)]


def _normal_run(output: str) -> str:
    """Its program's words, each once, without what depends on the machine and on when ranks were lost; not
    those of supervisors, who name their nodes, nor warnings of PyTorch about its network.
    """
    own = {line for line in output.splitlines() if re.match(r"\[\d+\] (rank|step|weights|shoal:) ", line)}
    own = {line for line in own if "was not saved" not in line}  # by who was at it when a peer was lost
    for pattern, instead in _VARYING:
        own = {re.sub(pattern, instead, line) for line in own}
    # Ranks speak in an order that is nobody's.
    return "\n".join(sorted(own)) + "\n"


_VARYING = (
    (r"step +\d+ of (\d+)  loss .*", r"step # of \1  loss #"),
    (r"weights [0-9a-f]{16}", "weights #"),
    (r"begins after step [1-9]\d*", "begins after step #"),
    (r"step \d+ from", "step # from"),
    (r"from rank \d", "from rank #"),
    (r"passing over step-[\d-]+ at \S+: __\d_\d", "passing over step-# at FOLDER: __#"),
)


def _normal_drills(output: str) -> str:
    found = re.sub(r"drl_\w+", "ID", output)
    found = re.sub(r"(goodput +)\S.*", r"\1#", found)  # may be that too few steps had been told of
    found = re.sub(r"of \S+/\d+ on \S+", "of JOB on NODE", found)
    found = re.sub(r"of \S+/\d+ and", "of JOB and", found)
    found = re.sub(r"cutting \S+ off", "cutting NODE off", found)
    found = re.sub(r"# attempts? w(as|ere) found", "# found", re.sub(r"\d+(\.\d+)?", "#", found))
    found = re.sub(r"(answers again .*\n)(steps lost .*\n)?(goodput .*\n)?", r"\1", found)  # see COSTS
    return re.sub(r"step-[#-]+", "step-#", found)


class DrillContract(SameFileContract):
    @pytest.fixture(scope="class")
    @classmethod
    def is_calm(cls, plane: ClusterPlane, cut_off: CutOffJob) -> Callable[[], bool]:
        """Whether the node that was cut off is known to be silent, or its job was begun again elsewhere."""
        return lambda: plane.is_reported_silent(cut_off.job) or len(plane.attempts(cut_off.job)) > 1

    def test_a_job_runs_on_a_node_and_its_log_comes_back(self, plane: ClusterPlane) -> None:
        said = "echo from $(hostname), $(env | grep -c ^RAY_) of Ray; exit 3"
        job = plane.submit(said, resources={"cpus": 1})
        plane.until_status(job, "failed")
        # Its keeper hands the last lines in after its supervisor has told the end.
        until(lambda: any(line.startswith("from n") for line in plane.log_of(job)), "its log comes back")
        assert plane.attempts(job)[-1]["exit_code"] == 3
        assert plane.log_of(job)[0].endswith(", 0 of Ray"), "nothing that Ray set reaches a job"

    def test_a_jobs_checkpoints_are_where_why_says_that_they_are(self, plane: ClusterPlane) -> None:
        job = plane.submit("echo 7 > $SHOAL_CHECKPOINT_DIR/step", resources={"cpus": 1}, checkpoint={})
        plane.until_status(job, "succeeded")
        kept = plane.shared / "checkpoints" / job.job_id
        assert (kept / "step").read_text() == "7\n"
        assert f"checkpoint: {kept}\n" in plane.command("why", job.ref).stdout
