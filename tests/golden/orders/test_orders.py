"""What a supervisor is told, whole, for a job that uses everything. `SHOAL_GOLDEN=write` renews the file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from shoal.wire import Order
from tests.support.lab import Lab

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


def told(lab: Lab) -> list[Order]:
    lab.turn()
    return [share.order for share in lab.cluster.shares()]


def rendered(orders: list[Order]) -> str:
    """Without what is unset, and with ids that do not change."""
    text = json.dumps(
        [{k: v for k, v in msgspec.to_builtins(order).items() if v is not None} for order in orders],
        indent=2,
        sort_keys=True,
    )
    names = {orders[0].attempt_id: "ATTEMPT", orders[0].job_id: "JOB"}
    for name, stands_for in names.items():
        text = text.replace(name, stands_for)
    return text + "\n"


@pytest.mark.parametrize("case", ["everything", "nothing_but_run"])
def test_what_the_supervisors_of_a_job_are_told(case: str) -> None:
    lab = Lab(mount_roots=(Path("/srv"),))
    lab.submit(**EVERYTHING if case == "everything" else {})
    path = HERE / f"{case}.json"
    text = rendered(told(lab))
    if os.environ.get("SHOAL_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
