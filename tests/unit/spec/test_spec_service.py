"""Services as people write them."""

from __future__ import annotations

import pytest

from shoal.errors import SpecError
from shoal.spec import JobSpec
from shoal.spec.parse import parse_service
from shoal.spec.service import ServiceSpec

LEAST = {"name": "chat", "run": "serve"}


def test_short_forms_mean_what_long_ones_do() -> None:
    short = parse_service(
        {**LEAST, "replicas": "0..8", "readiness": "/health", "rollout": "canary", "hosts": "chat.example"}
    )
    long = parse_service(
        {
            **LEAST,
            "kind": "service",
            "replicas": {"min": 0, "max": 8},
            "readiness": {"path": "/health"},
            "rollout": {"strategy": "canary"},
            "hosts": ["chat.example"],
        }
    )
    assert short == long
    assert parse_service({**LEAST, "replicas": 3}).replicas.max == 3


def test_model_is_a_name_or_a_checkpoint_of_a_job() -> None:
    assert parse_service({**LEAST, "model": "chat@7"}).model == "chat@7"
    by_number = parse_service({**LEAST, "model": {"job": 17, "step": 40}})
    assert by_number == parse_service({**LEAST, "model": {"job": "17", "step": 40}})
    assert ServiceSpec.model_validate_json(by_number.canonical_json()) == by_number


def test_canonical_text_reads_back_equal() -> None:
    spec = parse_service({**LEAST, "replicas": "1..2", "scale": {"target": "rps", "cooldown": "2m"}})
    assert ServiceSpec.model_validate_json(spec.canonical_json()) == spec
    assert parse_service(spec.canonical()) == spec


def test_network_of_its_own_is_for_one_node() -> None:
    assert parse_service({**LEAST, "network": "private", "port": "socket"}).network == "private"
    with pytest.raises(SpecError, match="`private` has room for one node"):
        parse_service({**LEAST, "network": "private", "resources": {"nodes": 2}})


def test_socket_is_for_one_node() -> None:
    with pytest.raises(SpecError, match="`socket` has room for one node; leave `port` out"):
        parse_service({**LEAST, "port": "socket", "resources": {"nodes": 2}})


def test_replica_is_a_job_with_what_the_two_have_in_common() -> None:
    spec = parse_service(
        {
            **LEAST,
            "env": {"A": 1},
            "secrets": ["KEY"],
            "resources": {"gpus": 2},
            "queue": "online",
            "grace": 5,
        }
    )
    job = spec.replica_job()
    assert JobSpec.model_validate_json(job.canonical_json()) == job
    assert (job.name, job.run, job.queue, job.grace, job.secrets) == (
        "chat",
        "serve",
        "online",
        5.0,
        ("KEY",),
    )
    assert (job.ranks_per_node, job.retry.max, job.time_limit) == (1, 0, None)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("replicas", "8..", "no upper end"),
        ("replicas", -1, "0 to 1,000"),
        ("name", "7", "read as a job's number"),
        ("kind", "job", "is not `service`"),
        ("time_limit", "1h", "unknown key `time_limit`"),
        ("model", {"job": "a b"}, "is not a job such as"),
        ("model", {"jib": "train"}, "2 mistakes"),
        ("model", 7, "`model` must be a mapping"),
        ("scale", {"sleep_after": "never"}, "`scale.sleep_after`"),
        ("rollout", "slowly", "is not `rolling` or `canary`"),
    ],
)
def test_wrong_value_is_refused_with_its_sentence(field: str, value: object, message: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_service({**LEAST, field: value})
    assert message in refused.value.message
