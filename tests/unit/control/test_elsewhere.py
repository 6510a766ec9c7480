"""A control plane that opens over another cluster than the one its attempts were handed to."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.control.elsewhere import find_left, refuse_another, settle_left
from shoal.engines.cluster_id import ClusterId, read_cluster, write_cluster
from shoal.engines.desk import Desk
from shoal.engines.local.book import Book
from shoal.engines.ray.config import RayConfig
from shoal.engines.slurm.config import SlurmConfig
from shoal.errors import Deposed, StateError
from shoal.model.attempt import EndReason
from shoal.model.job import Job
from shoal.model.node import NodeState
from shoal.wire import EndKind, Fetch
from tests.support.lab import ANA, Lab, now
from tests.unit.control.test_launch import taken_by

HERE = ClusterId(engine="local")
LAB = SlurmConfig(cluster="lab", heads=("a",)).cluster_id
PROD = SlurmConfig(cluster="prod", heads=("b",)).cluster_id


class Site:
    """A home with one attempt that is recorded as running, and was laid down where it is told to be."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.lab = Lab(home=home)
        taken = taken_by(self.lab)
        self.job: Job = self.lab.running()
        [submission] = taken
        self.orders = submission.orders

    def lay_on_desk(self) -> Desk:
        desk = Desk(self.home, self.lab.clock)
        desk.add(self.orders, None)
        return desk

    def open(self, cluster: ClusterId, term: int = 0) -> None:
        """As `open_core` does it."""
        left = now(find_left(self.lab.store, self.home, cluster, term))
        now(settle_left(self.lab.core, left, cluster))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.parametrize("cluster", [HERE, PROD, RayConfig(address="10.0.0.1:6379").cluster_id], ids=str)
def test_what_may_run_on_one_cluster_is_never_judged_by_another(site: Site, cluster: ClusterId) -> None:
    site.open(LAB)
    site.lay_on_desk()
    with pytest.raises(StateError) as refused:
        site.open(cluster)
    told = f"1 attempts may run on the Slurm `lab` (a), and this control plane would hand work to {cluster}"
    assert refused.value.message.startswith(told)
    assert f"{site.job.reference} on n1" in refused.value.message
    assert "shoal connect" in str(refused.value.hint)
    assert read_cluster(site.home) == LAB
    site.open(LAB)


def test_what_may_run_here_is_never_judged_by_a_cluster(site: Site) -> None:
    Book(site.home).add(site.orders, None)
    with pytest.raises(StateError, match="may run on this machine"):
        site.open(LAB)
    site.open(HERE)


def test_a_home_of_before_knows_by_the_folder_where_its_work_is(site: Site) -> None:
    site.lay_on_desk()
    with pytest.raises(StateError, match="a Slurm or Ray that was connected before"):
        site.open(HERE)
    assert read_cluster(site.home) is None
    site.open(LAB)  # what was connected then: nobody knows another
    assert read_cluster(site.home) == LAB
    with pytest.raises(StateError, match="the Slurm `lab`"):
        site.open(PROD)


def test_what_has_ended_there_is_recorded_as_it_ended_and_not_as_lost(site: Site) -> None:
    site.open(LAB)
    desk = site.lay_on_desk()
    [share] = desk.shares()
    desk.bury(share, EndKind.EXITED, "done")
    site.open(HERE)
    assert site.lab.attempt(site.job).reason is EndReason.EXIT
    assert read_cluster(site.home) == HERE


def test_what_was_placed_and_never_laid_down_there_goes_to_the_other(site: Site) -> None:
    site.open(LAB)
    site.lay_on_desk().withdraw(site.orders[0].attempt_id)
    site.open(PROD)
    assert read_cluster(site.home) == PROD


def test_what_the_store_says_has_ended_keeps_nobody_away(site: Site) -> None:
    site.open(LAB)
    site.lay_on_desk()
    site.lab.stop(site.job)
    site.lab.clock.advance(3600)
    site.lab.turn()
    assert site.lab.status(site.job) == "cancelled"
    site.open(HERE)


def test_one_that_was_deposed_lays_nothing_down_for_the_engine_of_before(site: Site) -> None:
    frozen = Desk(site.home, site.lab.clock)
    site.open(HERE, term=1)
    with pytest.raises(OSError, match="No such file"):
        frozen.add(site.orders, None)
    with pytest.raises(Deposed):
        site.open(HERE)


def test_who_stands_by_would_hand_work_to_the_cluster_of_who_leads(tmp_path: Path) -> None:
    refuse_another(tmp_path, HERE)
    write_cluster(tmp_path, LAB)
    refuse_another(tmp_path, SlurmConfig(cluster="lab", heads=("a",), ssh="ana@b").cluster_id)
    with pytest.raises(StateError, match=r"hands work to the Slurm `lab` \(a\)"):
        refuse_another(tmp_path, HERE)


def test_an_order_that_waits_in_a_clusters_queue_may_run_there(site: Site) -> None:
    site.open(LAB)
    desk = site.lay_on_desk()
    order = site.orders[0]
    with pytest.raises(StateError):
        site.open(PROD)
    desk = Desk(site.home, site.lab.clock)
    desk.take(Fetch(attempt_id=order.attempt_id, node=order.node, process="one"))
    with pytest.raises(StateError):
        site.open(PROD)


def make_real(lab: Lab) -> None:
    facts = lab.cluster.facts
    facts |= {name: msgspec.structs.replace(one, is_simulated=False) for name, one in facts.items()}
    lab.heal()


def moved(site: Site, cluster: ClusterId) -> Lab:
    """Its work has ended, and the cluster that is open now has but the second of its nodes."""
    lab = site.lab
    make_real(lab)
    site.open(LAB)
    lab.stop(site.job)
    lab.clock.advance(3600)
    lab.turn()
    now(lab.plane.set_node_state(ANA, "n2", NodeState.CORDONED, "bad fan"))
    site.open(cluster)
    del lab.cluster.facts["n1"]
    return lab


@pytest.mark.parametrize("cluster", [PROD, HERE], ids=str)
def test_nodes_of_the_cluster_before_are_forgotten_unless_this_one_has_them(
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


def test_a_node_that_something_holds_is_not_forgotten(site: Site) -> None:
    make_real(site.lab)
    site.open(LAB)
    site.open(PROD)  # it was placed and never laid down
    del site.lab.cluster.facts["n1"]
    site.lab.heal()
    assert "n1" in [node.name for node in site.lab.read(lambda tx: tx.nodes.all())]
    site.lab.stop(site.job)
    site.lab.clock.advance(3600)
    site.lab.turn()
    site.lab.heal()
    assert [node.name for node in site.lab.read(lambda tx: tx.nodes.all())] == ["n2"]
