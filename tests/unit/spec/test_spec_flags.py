"""Flags: the same names, the same meaning, mistakes named as they were typed."""

from __future__ import annotations

import pytest

from shoal.errors import SpecError
from shoal.spec import parse_job, spec_from_flags


def test_flags_mean_what_the_mapping_means() -> None:
    assert spec_from_flags(
        run="python x.py",
        name="x",
        gpus="H100:8",
        nodes="2..4",
        cpus="4+",
        memory="32GB..",
        disk=None,
        time_limit="1h",
        priority="-5",
        ranks_per_node="8",
        env=["A=1", "B=x=y"],
        secrets=["TOKEN"],
        mounts=("/a:/b:ro",),
        after=["17", "y:failed"],
        array="0-9%2",
        retry="3",
        retry_on="exit,oom",
        retry_backoff="10s",
        checkpoint="ckpt",
        checkpoint_interval="10m",
        log_rules=["a=b=exclude_node"],
        topology="rack",
        grace="5s",
        fence="10m",
        workdir="src",
        setup="make",
        queue="q",
        project="p",
    ) == parse_job(
        {
            "run": "python x.py",
            "name": "x",
            "queue": "q",
            "project": "p",
            "workdir": "src",
            "setup": "make",
            "resources": {"gpus": "H100:8", "nodes": "2..4", "cpus": "4+", "memory": "32GB.."},
            "time_limit": 3600,
            "priority": -5,
            "ranks_per_node": 8,
            "env": {"A": "1", "B": "x=y"},
            "secrets": ["TOKEN"],
            "mounts": [{"source": "/a", "target": "/b", "read_only": True}],
            "after": [{"job": "17"}, {"job": "y", "on": "failed"}],
            "array": {"indices": list(range(10)), "at_once": 2},
            "retry": {"max": 3, "on": ["exit", "oom"], "backoff": 10},
            "checkpoint": {"path": "ckpt", "interval": 600},
            "log_rules": [{"match": "a=b", "action": "exclude_node"}],
            "topology": {"within": "rack"},
            "grace": 5,
            "fence": 600,
        }
    )


def test_flags_that_were_not_given_change_nothing() -> None:
    assert spec_from_flags(run="x", name=None, env=(), mounts=[], retry=None) == parse_job({"run": "x"})


def test_every_mistake_is_named_by_its_flag() -> None:
    with pytest.raises(SpecError) as refused:
        spec_from_flags(
            time_limit="soon",
            memory="32G",
            priority="very high",
            retry_on="omo",
            retry="1",
            mounts=["x"],
            log_rules=["x"],
            env={"A B": "1"},
            gpu=1,
        )
    assert refused.value.problems == (
        "`--log-rule`: `x` has no `=`; write `REGEX=exclude_node` or `REGEX=stop_retries`",
        "`--gpu`: unknown flag; did you mean `--gpus`?",
        "`--priority` must be a whole number, not the text `very high`",
        "`--time-limit`: `soon` is not a time such as `90s`, `1h30m`, `2d` or `12:00:00`",
        "`--memory`: `32G` has an unclear unit; write `32GB` (of 1000) or `32GiB` (of 1024)",
        "`run` is missing; write the command to run",
        "`--env`: `A B` is not made of letters, digits and `_`, the first no digit",
        "`--mount`: `x` is not a mount such as `/srv/data:/data` or `/srv/data:/data:ro`",
        "`--retry-on`: `omo` is not `exit`, `signal`, `oom`, `setup` or `time_limit`; did you mean `oom`?",
    )


def test_an_empty_workdir_is_none_at_all() -> None:
    assert spec_from_flags(run="x", workdir="") == parse_job({"run": "x", "workdir": None})
