"""What supervisors are told follows from the job alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.control.orders import orders_for
from shoal.model.attempt import NodeShare
from shoal.model.job import RetryPolicy
from shoal.wire import Order
from tests.support.store_records import a_job, a_node, an_attempt


def orders(spec_json: str, epoch: int = 1) -> tuple[Order, ...]:
    job = a_job(spec_json=spec_json, retry=RetryPolicy(max_retries=3))
    shares = tuple(NodeShare(node=name, cpus=1.0, memory_bytes=1 << 30) for name in ("n1", "n2"))
    nodes = {name: a_node(name) for name in ("n1", "n2")}
    attempt = an_attempt(job, epoch, allocation=shares)
    return orders_for(
        job,
        attempt,
        nodes,
        uid=200_001,
        home=Path("/srv/shoal"),
        mount_roots=(),
        control_urls=(),
        renew_s=5.0,
    )


@pytest.mark.parametrize(
    ("checkpoint", "path"), [("{}", None), ('{"path":"ckpt"}', "ckpt"), ('{"path":"/ckpt"}', "/ckpt")]
)
def test_every_node_and_every_attempt_gets_the_jobs_one_checkpoint_directory(
    checkpoint: str, path: str | None
) -> None:
    spec = f'{{"checkpoint":{checkpoint},"run":"true"}}'
    told = [*orders(spec, epoch=1), *orders(spec, epoch=2)]
    assert {(order.checkpoint_dir, order.checkpoint_path) for order in told} == {
        ("/srv/shoal/checkpoints/job_00000001", path)
    }


def test_a_job_that_asks_for_none_gets_no_checkpoint_directory() -> None:
    assert {order.checkpoint_dir for order in orders('{"run":"true"}')} == {None}


def test_a_folder_for_all_nodes_is_in_the_jobs_directory_and_nobody_stands_by_with_a_copy() -> None:
    told = orders('{"run":"true","shared":true}')
    assert {(one.checkpoint_dir, one.has_shared_folder, one.has_standby) for one in told} == {
        ("/srv/shoal/checkpoints/job_00000001", True, False)
    }
    assert {one.has_standby for one in orders('{"run":"true"}')} == {True}
