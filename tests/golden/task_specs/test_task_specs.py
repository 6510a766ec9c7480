"""The whole task spec of a job that uses everything. `SHOAL_GOLDEN=write` rewrites the files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from shoal.wire import TaskSpec
from tests.support.planes.bench import ControlPlaneLab

HERE = Path(__file__).parent
EVERYTHING = {
    "name": "train-7b",
    "run": "torchrun train.py",
    "setup": "pip install -r requirements.txt",
    "env": {"EPOCHS": "3"},
    "resources": {"require": {"pool": "default"}, "nodes": 2, "gpus": "H100:2", "cpus": 4, "memory": "8GiB"},
    "mounts": ["/srv/data:/data:ro"],
    "array": {"indices": [4, 7], "at_once": 1},
    "time_limit": "2h",
    "grace": "1m",
    "fence": "10m",
    "log_rules": [{"match": "Xid 79", "action": "exclude_node"}],
}


def task_specs_of(lab: ControlPlaneLab) -> list[TaskSpec]:
    lab.run_loops()
    return [task.task_spec for task in lab.cluster.tasks()]


def rendered(orders: list[TaskSpec]) -> str:
    """Render without unset fields, and with ids that do not change."""
    text = json.dumps(
        [
            {
                part: {field: value for field, value in fields.items() if value is not None}
                for part, fields in msgspec.to_builtins(order).items()
            }
            for order in orders
        ],
        indent=2,
        sort_keys=True,
    )
    names = {orders[0].identity.attempt_id: "ATTEMPT", orders[0].identity.job_id: "JOB"}
    for name, stands_for in names.items():
        text = text.replace(name, stands_for)
    return text + "\n"


@pytest.mark.parametrize("case", ["everything", "nothing_but_run"])
def test_task_specs_of_a_job_match_the_golden_file(case: str) -> None:
    lab = ControlPlaneLab(mount_roots=(Path("/srv"),))
    lab.submit(**EVERYTHING if case == "everything" else {})
    path = HERE / f"{case}.json"
    text = rendered(task_specs_of(lab))
    if os.environ.get("SHOAL_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
