"""What supervisors are told follows from the job alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.control.job_specs import task_specs_for
from shoal.model.attempt import NodeTask
from shoal.model.job import RetryPolicy
from shoal.wire import TaskSpec
from tests.support.store_records import a_job, a_node, an_attempt


def task_specs(spec_json: str, epoch: int = 1) -> tuple[TaskSpec, ...]:
    job = a_job(spec_json=spec_json, retry=RetryPolicy(max_retries=3))
    allocation = tuple(NodeTask(node=name, cpus=1.0, memory_bytes=1 << 30) for name in ("n1", "n2"))
    nodes = {name: a_node(name) for name in ("n1", "n2")}
    attempt = an_attempt(job, epoch, allocation=allocation)
    return task_specs_for(
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
    specs = [*task_specs(spec, epoch=1), *task_specs(spec, epoch=2)]
    assert {(task_spec.folders.checkpoint_dir, task_spec.folders.checkpoint_path) for task_spec in specs} == {
        ("/srv/shoal/checkpoints/job_00000001", path)
    }


def test_a_job_that_asks_for_none_gets_no_checkpoint_directory() -> None:
    assert {task_spec.folders.checkpoint_dir for task_spec in task_specs('{"run":"true"}')} == {None}


def test_shared_folder_is_in_the_jobs_directory_and_there_is_no_standby() -> None:
    specs = task_specs('{"run":"true","shared":true}')
    assert {
        (task_spec.folders.checkpoint_dir, task_spec.folders.has_shared_folder, task_spec.ranks.has_standby)
        for task_spec in specs
    } == {("/srv/shoal/checkpoints/job_00000001", True, False)}
    assert {task_spec.ranks.has_standby for task_spec in task_specs('{"run":"true"}')} == {True}
