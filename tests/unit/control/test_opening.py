"""A control plane that opens over another cluster than the one its attempts were handed to."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.control.opening import find_abandoned, refuse_other_cluster, settle_abandoned
from shoal.engines.home_records import ClusterId, read_cluster, write_cluster
from shoal.engines.local.spool_index import SpoolIndex
from shoal.engines.ray.config import RayConfig
from shoal.engines.remote.mailbox import Mailbox
from shoal.engines.slurm.config import SlurmConfig
from shoal.errors import Deposed, StateError
from shoal.model.attempt import EndReason
from shoal.model.job import Job
from shoal.model.node import NodeState
from shoal.wire import EndKind, TaskSpecRequest
from tests.support.planes.bench import ANA, ControlPlaneLab, result_of
from tests.unit.control.loops.test_launch import taken_by

HERE = ClusterId(engine="local")
LAB = SlurmConfig(cluster="lab", heads=("a",)).cluster_id
PROD = SlurmConfig(cluster="prod", heads=("b",)).cluster_id


class Site:
    """A home with one attempt that is recorded as running, laid down where the test says."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.lab = ControlPlaneLab(home=home)
        taken = taken_by(self.lab)
        self.job: Job = self.lab.running_job()
        [submission] = taken
        self.task_specs = submission.task_specs

    def lay_in_mailbox(self) -> Mailbox:
        mailbox = Mailbox(self.home, self.lab.clock)
        mailbox.add(self.task_specs, None)
        return mailbox

    def open(self, cluster: ClusterId, term: int = 0) -> None:
        """Open as `open_core` does."""
        left = result_of(find_abandoned(self.lab.store, self.home, cluster, term))
        result_of(settle_abandoned(self.lab.core.records, self.lab.core.settings.state_dir, left, cluster))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.parametrize("cluster", [HERE, PROD, RayConfig(address="10.0.0.1:6379").cluster_id], ids=str)
def test_work_that_may_run_on_one_cluster_is_never_judged_by_another(site: Site, cluster: ClusterId) -> None:
    site.open(LAB)
    site.lay_in_mailbox()
    with pytest.raises(StateError) as refused:
        site.open(cluster)
    message = (
        f"1 attempts may run on the Slurm `lab` (a), and this control plane would hand work to {cluster}"
    )
    assert refused.value.message.startswith(message)
    assert f"{site.job.reference} on n1" in refused.value.message
    assert "shoal connect" in str(refused.value.hint)
    assert read_cluster(site.home) == LAB
    site.open(LAB)


def test_local_work_is_never_judged_by_a_cluster(site: Site) -> None:
    SpoolIndex(site.home).add(site.task_specs, None)
    with pytest.raises(StateError, match="may run on this machine"):
        site.open(LAB)
    site.open(HERE)


def test_home_without_a_cluster_record_knows_its_cluster_by_the_folder(site: Site) -> None:
    site.lay_in_mailbox()
    with pytest.raises(StateError, match="a Slurm or Ray that was connected before"):
        site.open(HERE)
    assert read_cluster(site.home) is None
    site.open(LAB)  # the cluster that was connected then is not recorded
    assert read_cluster(site.home) == LAB
    with pytest.raises(StateError, match="the Slurm `lab`"):
        site.open(PROD)


def test_work_that_ended_on_the_former_cluster_is_not_recorded_as_lost(site: Site) -> None:
    site.open(LAB)
    mailbox = site.lay_in_mailbox()
    [task] = mailbox.tasks()
    mailbox.reap(task, EndKind.EXITED, "done")
    site.open(HERE)
    assert site.lab.attempt(site.job).reason is EndReason.EXIT
    assert read_cluster(site.home) == HERE


def test_work_that_was_never_laid_down_goes_to_the_new_cluster(site: Site) -> None:
    site.open(LAB)
    site.lay_in_mailbox().withdraw(site.task_specs[0].identity.attempt_id)
    site.open(PROD)
    assert read_cluster(site.home) == PROD


def test_attempt_that_ended_in_the_store_blocks_no_start(site: Site) -> None:
    site.open(LAB)
    site.lay_in_mailbox()
    site.lab.stop(site.job)
    site.lab.clock.advance(3600)
    site.lab.run_loops()
    assert site.lab.status(site.job) == "cancelled"
    site.open(HERE)


def test_deposed_control_plane_lays_nothing_down_for_the_former_engine(site: Site) -> None:
    frozen = Mailbox(site.home, site.lab.clock)
    site.open(HERE, term=1)
    with pytest.raises(OSError, match="No such file"):
        frozen.add(site.task_specs, None)
    with pytest.raises(Deposed):
        site.open(HERE)


def test_standby_with_another_cluster_than_the_leader_is_refused(tmp_path: Path) -> None:
    refuse_other_cluster(tmp_path, HERE)
    write_cluster(tmp_path, LAB)
    refuse_other_cluster(tmp_path, SlurmConfig(cluster="lab", heads=("a",), ssh="ana@b").cluster_id)
    with pytest.raises(StateError, match=r"hands work to the Slurm `lab` \(a\)"):
        refuse_other_cluster(tmp_path, HERE)


def test_task_that_waits_in_a_clusters_queue_may_run_there(site: Site) -> None:
    site.open(LAB)
    mailbox = site.lay_in_mailbox()
    task_spec = site.task_specs[0]
    with pytest.raises(StateError):
        site.open(PROD)
    mailbox = Mailbox(site.home, site.lab.clock)
    mailbox.assign(
        TaskSpecRequest(attempt_id=task_spec.identity.attempt_id, node=task_spec.identity.node, process="one")
    )
    with pytest.raises(StateError):
        site.open(PROD)


def make_real(lab: ControlPlaneLab) -> None:
    facts = lab.cluster.facts
    facts |= {name: msgspec.structs.replace(fact, is_simulated=False) for name, fact in facts.items()}
    lab.heal()


def moved(site: Site, cluster: ClusterId) -> ControlPlaneLab:
    """Its work has ended, and the cluster that is open now has only the second of its nodes."""
    lab = site.lab
    make_real(lab)
    site.open(LAB)
    lab.stop(site.job)
    lab.clock.advance(3600)
    lab.run_loops()
    result_of(lab.plane.set_node_state(ANA, "n2", NodeState.CORDONED, "bad fan"))
    site.open(cluster)
    del lab.cluster.facts["n1"]
    return lab


@pytest.mark.parametrize("cluster", [PROD, HERE], ids=str)
def test_nodes_of_the_former_cluster_are_forgotten_unless_the_new_one_has_them(
    site: Site, cluster: ClusterId
) -> None:
    lab = moved(site, cluster)
    lab.heal()
    [kept] = lab.read(lambda tx: tx.nodes.all())
    assert (kept.name, kept.state, kept.engine) == ("n2", NodeState.CORDONED, "fake")
    assert [event.node for event in lab.events("node.removed")] == ["n1"]
    del lab.cluster.facts["n2"]
    lab.heal()
    assert [node.name for node in lab.read(lambda tx: tx.nodes.all())] == ["n2"], "silent, and this cluster's"


def test_nodes_of_the_same_cluster_stay(site: Site) -> None:
    lab = moved(site, SlurmConfig(cluster="lab", heads=("a",), ssh="ana@b").cluster_id)
    lab.heal()
    assert [node.name for node in lab.read(lambda tx: tx.nodes.all())] == ["n1", "n2"]


def test_node_that_holds_resources_is_not_forgotten(site: Site) -> None:
    make_real(site.lab)
    site.open(LAB)
    site.open(PROD)  # it was placed and never laid down
    del site.lab.cluster.facts["n1"]
    site.lab.heal()
    assert "n1" in [node.name for node in site.lab.read(lambda tx: tx.nodes.all())]
    site.lab.stop(site.job)
    site.lab.clock.advance(3600)
    site.lab.run_loops()
    site.lab.heal()
    assert [node.name for node in site.lab.read(lambda tx: tx.nodes.all())] == ["n2"]
