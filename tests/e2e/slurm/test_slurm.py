"""Shoal on a real Slurm: what it must stand on every cluster, and what only Slurm has."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shoal.client.handles import JobHandle
from shoal.home import pid_holding
from tests.contract.cluster.drills import DrillContract
from tests.contract.cluster.listeners import ListenerContract, probe
from tests.contract.cluster.partitions import CutOffJob, PartitionContract
from tests.contract.cluster.survival import OrphanedJob, SurvivalContract
from tests.support.faults.listener_probe import CLOSED, NO_TLS, SILENT
from tests.support.faults.witness import since_boot
from tests.support.host.processes import Listener
from tests.support.planes.cluster_plane import ONE_NODE, TWO_NODES, ClusterPlane
from tests.support.planes.real import until
from tests.support.slurm.owners_plane import slurm_name
from tests.support.slurm.ports import (
    FOREIGN_MUNGE,
    NO_CREDENTIAL,
    NOISE,
    OWN_MUNGE,
    QUESTIONS,
    REFUSED,
    SAFE,
    Intruder,
    an_intruder,
    ask_rest,
    role_of,
    slurm_listeners,
)
from tests.support.slurm.real_slurm import SlurmLab

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("cleared"),
]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory, slurm: SlurmLab) -> Iterator[ClusterPlane]:
    real = ClusterPlane(tmp_path_factory.mktemp("slurm-plane") / "home", slurm, "--serve-on", "127.0.0.1:0")
    told = real.connect()
    assert (told["nodes"], told["alive"], told["nodes_on"]) == (3, 3, f"{slurm.address}:7464")
    real.up()
    try:
        yield real
    finally:
        real.down()


class TestDrills(DrillContract):
    pass


@pytest.fixture(scope="module")
def intruder(slurm: SlurmLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Intruder]:
    with an_intruder(slurm, tmp_path_factory.mktemp("intruder")) as somebody:
        yield somebody


def is_told(said: str) -> bool:
    """Whether it is more than a refusal; slurmdbd says in words that it did not understand."""
    return said not in (CLOSED, NO_TLS, SILENT) and "Failed to unpack" not in said


class TestListeners(ListenerContract):
    def test_slurms_daemons_do_nothing_for_who_has_not_its_munge_key(
        self, plane: ClusterPlane, slurm: SlurmLab, jobs: tuple[JobHandle, JobHandle], intruder: Intruder
    ) -> None:
        before = [plane.attempt(job) for job in jobs]
        told = {
            (shown, *words): intruder.ask(shown, *words)
            for shown in (FOREIGN_MUNGE, NO_CREDENTIAL)
            for questions in QUESTIONS.values()
            for words in questions
        }
        assert {asked: said for asked, said in told.items() if not said.startswith(REFUSED)} == {}
        assert "intruder" not in slurm.run("squeue", "-h", "-t", "all", "-o", "%j")
        assert "intruder" not in slurm.run("scontrol", "show", "node")
        assert "intruder" not in slurm.run("sacctmgr", "-n", "-P", "show", "account")
        assert [plane.attempt(job) for job in jobs] == before
        assert {intruder.ask(OWN_MUNGE, *words)[0] for words in SAFE} == {"0"}, (
            "with its key each is answered"
        )

    def test_slurms_ports_say_nothing_to_who_does_not_speak_its_language(
        self, plane: ClusterPlane, slurm: SlurmLab, jobs: tuple[JobHandle, JobHandle]
    ) -> None:
        """All of them, also those of `srun`, which changes with every job."""
        roles: set[str] = set()
        answered: dict[tuple[Listener, str], str] = {}
        for place, targets in slurm_listeners(slurm).items():
            for listener in targets:
                roles.add(role_of(listener))
                replies = probe_if_it_still_listens(slurm, place, listener)
                if role_of(listener) != "slurmrestd":  # which speaks HTTP, and is tried in it
                    answered |= {(listener, name): reply for name, reply in replies.items() if is_told(reply)}
        assert {"slurmctld", "slurmdbd", "slurmrestd", "slurmd", "srun"} <= roles
        assert answered == {}
        plane.wait_for_progress(jobs[0], 1)

    def test_slurmrestd_tells_nobody_anything_without_a_token(
        self, slurm: SlurmLab, jobs: tuple[JobHandle, JobHandle]
    ) -> None:
        assert slurm.rest is not None
        token = slurm.rest.token()
        right = ask_rest(slurm, token)
        assert {said.status for said in right.values()} == {200}
        for wrong in (None, f"{token[:-4]}AAAA"):
            for path, said in ask_rest(slurm, wrong).items():
                # v0.0.38 has an error inside of a 200, with nothing beside it.
                assert said.status in (401, 403, 500) or "authentication error" in said.body, (path, said)
                assert "shoal-" not in said.body, (path, said)


class TestSurvival(SurvivalContract):
    sees_agent_end = False
    """Slurm's job, of which it has one word for all nodes, lives while another keeper does."""


class TestCuts(PartitionContract):
    pass


def probe_if_it_still_listens(lab: SlurmLab, place: str, listener: Listener) -> dict[str, str]:
    """Return its replies; none if it has ended since it was listed, as an `srun` does with its job."""
    try:
        return probe(lab, place, listener, NOISE, timeout_s=1.0)
    except AssertionError:
        if listener in slurm_listeners(lab)[place]:
            raise
        return {}


@pytest.fixture
def full(plane: ClusterPlane, slurm: SlurmLab, cut_off: CutOffJob, bereft: OrphanedJob) -> Iterator[None]:
    """All that is free of the cluster is somebody else's: what is submitted waits in Slurm's queue."""
    lost = slurm_name(bereft.job, plane.attempts(bereft.job)[0]["attempt_id"])
    # A slurmctld that forgets its end would have it run for ever, and there would be no room.
    until(lambda: not slurm.run("squeue", "-h", "-n", lost), "what lost its keeper is over for Slurm")
    slurm.fill(*slurm.names)
    begun = ("squeue", "-h", "-n", "filler", "-t", "R", "-o", "%N")
    others = set(slurm.others(cut_off.node))
    until(lambda: others <= set(slurm.run(*begun).split()), "all have come")
    yield
    slurm.cancel("filler")


@contextmanager
def frozen(plane: ClusterPlane) -> Iterator[None]:
    """Its control plane does nothing meanwhile."""
    pid = pid_holding(plane.home)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def held(slurm: SlurmLab, name: str) -> str:
    """The id of somebody's job, which does not begin."""
    words = ("--parsable", "--hold", f"--job-name={name}", "--output=/dev/null", "--wrap=true")
    return slurm.run("sbatch", *words).strip()


def waiting(plane: ClusterPlane, slurm: SlurmLab) -> tuple[JobHandle, str]:
    """A job that waits in Slurm's queue, which is full, and its name there."""
    job = plane.submit_witness({"cpus": 2})
    name = slurm_name(job, plane.attempt(plane.until_status(job, "starting"))["attempt_id"])
    waits = ("squeue", "-h", "-n", name, "-o", "%T")
    until(lambda: slurm.run(*waits) == "PENDING\n", "it waits in Slurm's queue")
    return job, name


class TestSlurm:
    def test_what_waits_in_slurms_queue_is_explained_in_its_words(
        self, plane: ClusterPlane, slurm: SlurmLab, full: None
    ) -> None:
        job = plane.submit("true", resources={"cpus": 2})
        plane.until_explained(job, "is PENDING (")
        slurm.cancel("filler")
        plane.until_status(job, "succeeded")

    def test_what_waits_in_slurms_queue_for_a_node_that_is_drained_there_goes_elsewhere(
        self, plane: ClusterPlane, slurm: SlurmLab, request: pytest.FixtureRequest
    ) -> None:
        runs = plane.start_witness(ONE_NODE)
        [node] = plane.attempt(runs)["nodes"]
        request.getfixturevalue("full")
        with plane.only_node(node):
            job, name = waiting(plane, slurm)
        slurm.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=a fan")
        drained_at = since_boot()
        try:
            until(lambda: len(plane.attempts(job)) == 2, "it is taken back")
            print(f"taken back from a drained node after {since_boot() - drained_at:.1f} s")
            until(lambda: not slurm.run("squeue", "-h", "-n", name), "its job is gone from Slurm's queue")
            plane.until_explained(
                job, f"attempt 1 ended: lost: {node}: taken back before it began: `{node}` takes no"
            )
            slurm.cancel("filler")
            plane.until_starts(job, 1)
        finally:
            slurm.resume(node)
        lost, ran = plane.attempts(job)
        assert (lost["reason"], lost["nodes"], ran["nodes"] == [node]) == ("lost", [node], False)
        plane.finish(job, attempts=2)
        plane.wait_for_progress(runs)
        plane.finish(runs)

    def test_slurmd_killed_and_started_again_with_work_waiting_for_its_node(
        self, plane: ClusterPlane, slurm: SlurmLab, full: None
    ) -> None:
        job, _ = waiting(plane, slurm)
        [node] = plane.attempt(job)["nodes"]
        slurm.kill_daemon(node)
        with plane.only_node(node):
            # Slurm finds out by itself when it starts something there.
            late = plane.submit_witness(ONE_NODE)
            plane.until_status(late, "starting")
            slurm.start_node(node)
            plane.until_starts(late, 1)
        slurm.cancel("filler")
        plane.until_starts(job, 1)
        for one in (job, late):
            assert plane.attempt(one)["nodes"] == [node]
            plane.finish(one)

    def test_slurmctld_killed_right_after_a_submission(
        self, plane: ClusterPlane, slurm: SlurmLab, request: pytest.FixtureRequest
    ) -> None:
        running = plane.start_witness(TWO_NODES)
        request.getfixturevalue("full")
        slurm.until_saved()
        waits = plane.submit_witness({"cpus": 2})
        name = slurm_name(waits, plane.attempt(plane.until_status(waits, "starting"))["attempt_id"])
        listed = ("squeue", "-h", "-t", "all", "-n", name, "-o", "%i")
        number = until(lambda: slurm.run(*listed).strip(), "Slurm has accepted it")
        slurm.kill_controller(loses_state=True)
        plane.wait_for_progress(running, 1)
        with frozen(plane):  # so that nobody submits it again before we have looked
            slurm.start_controller()
            assert slurm.run(*listed) == "", "Slurm has lost it"
            assert held(slurm, "stranger") == number, "its id is given away"
        killed_at = since_boot()
        slurm.cancel("filler")
        plane.until_starts(waits, 1)
        begun_s = plane.witness.lines(waits.job_id, "start")[0].at - killed_at
        print(f"a lost submission began {begun_s:.1f} s after slurmctld was back")
        assert slurm.run(*listed).split() not in ([], [number])
        assert slurm.run("squeue", "-h", "-n", "stranger", "-o", "%i %T") == f"{number} PENDING\n"
        slurm.cancel("stranger", "news")
        plane.finish(waits)
        plane.finish(running)

    def test_slurmctld_killed_right_after_a_job_began(
        self, plane: ClusterPlane, slurm: SlurmLab, request: pytest.FixtureRequest
    ) -> None:
        """Slurm has only written down that it waits: it ends what runs, and drains the node for it."""
        request.getfixturevalue("full")
        job, name = waiting(plane, slurm)
        listed = ("squeue", "-h", "-n", name, "-o", "%T")
        slurm.until_saved()
        slurm.cancel("filler")
        plane.until_starts(job, 1)
        plane.wait_for_progress(job)
        slurm.kill_controller(loses_state=True)
        killed_at = since_boot()
        plane.wait_for_progress(job)
        slurm.start_controller()
        assert slurm.run(*listed) == "PENDING\n", "it knows nothing of what runs"
        slurm.cancel("filler", "news")
        [node] = plane.attempts(job)[0]["nodes"]
        until(lambda: "Duplicate" in slurm.run("scontrol", "show", "node", node), "Slurm drains its node")
        try:
            plane.until_starts(job, 2)
            again_s = plane.witness.lines(job.job_id, "start")[1].at - killed_at
            print(f"a job that Slurm had begun twice began {again_s:.1f} s after slurmctld was killed")
            assert plane.attempt(job)["nodes"] != [node]
            # One in between was given the node before anybody knew that it is drained, and never began.
            plane.finish(job, attempts=2 if plane.attempts(job)[1]["nodes"] != [node] else 3)
        finally:
            slurm.resume(node)

    def test_slurmdbd_killed_and_started_again(self, plane: ClusterPlane, slurm: SlurmLab) -> None:
        assert slurm.accounting is not None
        before = plane.start_witness(ONE_NODE)
        slurm.accounting.kill()
        try:
            during = plane.start_witness(ONE_NODE)
            plane.finish(during)
        finally:
            slurm.accounting.start()
        name = f"shoal-{plane.attempt(during)['attempt_id']}"
        until(lambda: name in slurm.accounting.jobs(), "slurmdbd learns of what ran without it")  # type: ignore[union-attr]
        plane.finish(before)
