"""The job's fields as plain data: short forms, refusals, and what each default is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from shoal.errors import SpecError
from shoal.spec import AfterSpec, JobSpec, LogRuleSpec, MountSpec, RetrySpec, TopologySpec, parse_job


def job(**fields: Any) -> JobSpec:
    return parse_job({"run": "true", **fields})


def refusals(**fields: Any) -> tuple[str, ...]:
    with pytest.raises(SpecError) as refused:
        job(**fields)
    return refused.value.problems


def test_every_field_but_run_is_optional() -> None:
    spec = parse_job({"run": "python train.py"})
    assert spec.canonical_json() == '{"run":"python train.py"}'
    assert (spec.queue, spec.priority, spec.workdir, spec.grace, spec.fence) == (
        "default",
        0,
        ".",
        30.0,
        1800.0,
    )
    with pytest.raises(SpecError, match="`run` is missing"):
        parse_job({})


def test_a_spec_cannot_be_changed() -> None:
    spec = job()
    with pytest.raises(ValidationError):
        spec.run = "false"


def test_short_forms_mean_what_the_full_forms_mean() -> None:
    short = job(
        mounts={"/data": "/srv/data", "/ref": "/srv/ref:ro"},
        after="train:ended",
        retry=3,
        checkpoint="ckpt",
        log_rules={"Xid 79": "exclude_node"},
        topology="rack:preferred",
    )
    full = job(
        mounts=[
            {"source": "/srv/data", "target": "/data"},
            {"source": "/srv/ref", "target": "/ref", "read_only": True},
        ],
        after=[{"job": "train", "on": "ended"}],
        retry={"max": 3},
        checkpoint={"path": "ckpt"},
        log_rules=[{"match": "Xid 79", "action": "exclude_node"}],
        topology={"within": "rack", "mode": "preferred"},
    )
    assert short == full
    assert short.canonical_json() == full.canonical_json()
    assert short.mounts[1] == MountSpec(source="/srv/ref", target="/ref", read_only=True)
    assert short.after == (AfterSpec(job="train", on="ended"),)
    assert short.retry == RetrySpec(max=3, on=("exit", "signal"), backoff=5.0)
    assert short.log_rules == (LogRuleSpec(match="Xid 79", action="exclude_node"),)
    assert short.topology == TopologySpec(within="rack", mode="preferred")


@pytest.mark.parametrize(
    ("written", "indices", "at_once"),
    [
        (3, (0, 1, 2), None),
        ("3", (0, 1, 2), None),
        ("0..2", (0, 1, 2), None),
        ("0-2%10", (0, 1, 2), 10),
        ("5,1-2", (1, 2, 5), None),
        ([4, 2], (2, 4), None),
        ({"indices": "7-7", "at_once": 1}, (7,), 1),
    ],
)
def test_arrays_are_a_count_ranges_or_a_list(
    written: object, indices: tuple[int, ...], at_once: int | None
) -> None:
    array = job(array=written).array
    assert array is not None
    assert (array.indices, array.at_once) == (indices, at_once)


def test_an_array_of_ten_thousand_is_written_in_few_characters() -> None:
    spec = job(array=10_000)
    assert json.loads(spec.canonical_json())["array"] == {"indices": "0-9999"}
    assert JobSpec.model_validate_json(spec.canonical_json()) == spec


def test_an_array_of_one_index_is_not_read_back_as_a_count() -> None:
    spec = job(array=[5])
    assert JobSpec.model_validate_json(spec.canonical_json()) == spec


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"array": "0..999999999999"}, "more than 10,000 elements"),
        ({"array": 10_001}, "`10001` elements; an array has from 1 to 10,000"),
        ({"array": 0}, "`0` elements"),
        ({"array": "9-3"}, "`9-3` ends below its start; write `3..9`"),
        ({"array": [1, 1]}, "index `1` is there twice"),
        ({"array": []}, "`array.indices` is empty"),
        ({"array": list(range(10_001))}, "at most 10,000"),
        ({"array": [-1]}, "`-1` is below the least, 0"),
        ({"array": "0-9%x"}, "write `0-99%10`"),
        ({"array": "0-9%0"}, "`0` at once"),
        ({"name": "-x"}, "`-x` is not made of letters"),
        ({"name": ".x"}, "`.x` is not made of letters"),
        ({"name": "a b"}, "`a b` is not made of letters"),
        ({"name": "x\n"}, "is not made of letters"),
        ({"name": "17"}, "would be read as a job's number; write `job-17`"),
        ({"name": "x" * 101}, "`name` is 101 characters long; at most 100"),
        ({"name": "a\ud800"}, "half of a surrogate pair"),
        ({"run": ""}, "`run` is empty"),
        ({"run": " \n"}, "`run` is empty"),
        ({"run": "a\0b"}, "`run` has a NUL character at position 1"),
        ({"run": "é\ud800"}, "`run` has half of a surrogate pair at position 1"),
        ({"workdir": "\ud800"}, "`workdir` has half of a surrogate pair"),
        ({"env": {"A": "\ud800"}}, "`env.A` has half of a surrogate pair"),
        ({"env": {"\ud800": "x"}}, "half of a surrogate pair"),
        ({"\ud800": 1}, "half of a surrogate pair"),
        ({"run": "é" * (128 << 10) + "x"}, "`run` is 262,145 bytes long; at most 262,144"),
        ({"run": ["python", "x.py"]}, "`run` must be text, not a list"),
        ({"run": 5}, "`run` must be text, not `5`; put it in quotes"),
        ({"priority": 1001}, "`1001` is above the most, 1,000"),
        ({"priority": True}, "`priority` must be a whole number, not `true`"),
        ({"priority": "5"}, "`priority` must be a whole number, not the text `5`"),
        ({"priority": "Batch"}, "`priority` must be a whole number, not the text `Batch`"),
        ({"priority": 10**5000}, "a number of 5001 digits is above the most"),
        ({"time_limit": 0}, "`0` is 0s; from 1s to 3650d"),
        ({"time_limit": -5}, "from 1s to 3650d"),
        ({"time_limit": float("nan")}, "`nan` is not a number"),
        ({"time_limit": 1e308}, "from 1s to 3650d"),
        ({"fence": 3}, "from 1m to 30d"),
        ({"ranks_per_node": 0}, "`0` is below the least, 1"),
        ({"ranks_per_node": 1025}, "`1025` is above the most, 1,024"),
        ({"env": {"A=B": "x"}}, "`A=B` is not made of letters, digits and `_`"),
        ({"env": {"1A": "x"}}, "`1A` is not made of"),
        ({"env": {"A": 0.1}}, "`env.A` must be text, not `0.1`; put it in quotes"),
        ({"env": {"A": True}}, "`env.A` must be text, not `true`; put it in quotes"),
        ({"env": {"A": "x\0"}}, "`env.A` has a NUL character"),
        ({"env": {"A": "x" * (128 << 10)}}, "`A` is 131,075 bytes long; Linux takes at most 131,072"),
        (
            {"env": {f"A{n}": "x" * 30_000 for n in range(9)}},
            "`env` is 270,036 bytes in all; at most 262,144",
        ),
        ({"env": None}, "`env` has no value; give it one or remove it"),
        ({"env": ["A=1"]}, "`env` must be a mapping, not a list"),
        ({"secrets": ["A", "A"]}, "`A` is there twice"),
        ({"secrets": ["A"], "env": {"A": "x"}}, "`A` is also set in `env`"),
        ({"secrets": "TOKEN"}, "`secrets` must be a list, not the text `TOKEN`"),
        ({"mounts": ["/data"]}, "not a mount such as `/srv/data:/data`"),
        ({"mounts": ["data:/data"]}, "`data` is not absolute"),
        ({"mounts": ["/a/../etc:/data"]}, "has `..` in it"),
        ({"mounts": ["/a:/"]}, "`/` cannot be covered by a mount"),
        ({"mounts": ["/a:/proc/self"]}, "`/proc/self` cannot be covered"),
        ({"mounts": ["/a:/d", "/b:/d/"]}, "`/d` is the target of two mounts"),
        ({"after": ["a b"]}, "`a b` is not a job such as `17`"),
        ({"after": "x:done"}, "`done` is not `succeeded`, `failed` or `ended`"),
        ({"after": 0}, "`0` is not a job's number"),
        ({"retry": -1}, "`-1` retries; from 0 to 1,000"),
        ({"retry": {"on": []}}, "`retry.on` is empty"),
        (
            {"retry": {"on": "exit,omo"}},
            "`omo` is not `exit`, `signal`, `oom`, `setup` or `time_limit`; did you mean `oom`?",
        ),
        ({"retry": {"backoff": "2h"}}, "`2h` is 2h; from 0s to 1h"),
        ({"checkpoint": "../up"}, "has `..` in it"),
        ({"checkpoint": "./"}, "`./` is the work directory itself"),
        ({"checkpoint": "/"}, "`/` cannot be covered by a mount"),
        ({"checkpoint": "/d", "mounts": ["/a:/d/"]}, "`/d` is also the target of a mount"),
        ({"log_rules": {"(": "exclude_node"}}, "`(` is not a regular expression"),
        ({"log_rules": {"a{99999999999}": "exclude_node"}}, "is not a regular expression"),
        ({"log_rules": {"(" * 490 + ")" * 490: "exclude_node"}}, "nested too deeply"),
        (
            {"log_rules": {"x": "exclude"}},
            "`exclude` is not `exclude_node` or `stop_retries`; did you mean `exclude_node`?",
        ),
        (
            {"topology": {"mode": "required"}},
            "has neither `within` nor `spread`; write a level, such as `within: rack`",
        ),
        ({"state": "running"}, "unknown key `state`"),
        ({"command": "x"}, "unknown key `command`; did you mean `run`?"),
        ({"gpus": 8}, "unknown key `gpus`; `gpus` belongs in `resources`"),
        ({"mem": "1GB"}, "unknown key `mem`; `memory` belongs in `resources`"),
        (
            {"resources": {"timeout": 5}},
            "unknown key `timeout` in `resources`; `time_limit` belongs at the top level",
        ),
        ({"zzz": 1}, "the keys here are name, project, queue"),
        ({"resources": None}, "`resources` has no value"),
        ({"resources": []}, "`resources` must be a mapping, not a list"),
        ({"\x1b[31mred": 1}, r"unknown key `\x1b[31mred`"),
    ],
)
def test_a_mistake_is_shown_with_the_value_and_an_example(fields: dict[str, Any], message: str) -> None:
    problems = refusals(**fields)
    assert len(problems) == 1, problems
    assert message in problems[0]
    assert problems[0].startswith("request: ")
    assert problems[0].isprintable()


def test_keys_that_are_not_text_are_refused() -> None:
    with pytest.raises(SpecError, match="a key must be text"):
        parse_job({"run": "x", 5: 1})  # type: ignore[dict-item]
    with pytest.raises(SpecError, match="must be a mapping with `run`, not a list"):
        parse_job([])  # type: ignore[arg-type]


def test_whole_numbers_in_env_are_text_and_nothing_else_is_guessed() -> None:
    assert job(env={"EPOCHS": 3, "LR": "3e-4"}).env == {"EPOCHS": "3", "LR": "3e-4"}


def test_equal_policies_are_equal_specs_whatever_their_order() -> None:
    assert job(retry={"max": 1, "on": "oom,exit,oom"}) == job(retry={"max": 1, "on": ["exit", "oom"]})


def test_mistakes_beyond_fifty_are_counted() -> None:
    problems = refusals(**{f"key{n}": 1 for n in range(60)})
    assert len(problems) == 51
    assert problems[-1] == "request: and 10 more mistakes"


def test_every_key_that_could_be_mistyped_has_its_known_names_at_hand() -> None:
    full = {
        "resources": {
            "gpus": {},
            "nodes": {"min": 1, "max": 1},
            "cpus": {"min": 1},
            "memory": {"min": 1 << 20},
        },
        "mounts": [{"source": "/a", "target": "/b"}],
        "after": [{"job": "x"}],
        "array": {"indices": 1},
        "retry": {},
        "checkpoint": {"path": "x"},
        "log_rules": [{"match": "x", "action": "exclude_node"}],
        "topology": {"within": "rack"},
    }
    wrong = json.loads(json.dumps(full).replace("}", ', "qqq": 1}').replace("{, ", "{"))
    wrong.pop("qqq")
    problems = refusals(**wrong)
    assert len(problems) == 12
    assert all("unknown key `qqq`" in problem and "the keys here are" in problem for problem in problems)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"resources": {"gpus": {"kind": "8x"}}}, "`8x` is not a kind of GPU such as `H100`"),
        ({"topology": "the rack"}, "`the rack` is not a level such as `rack`"),
    ],
)
def test_a_pattern_is_described_in_words(fields: dict[str, Any], message: str) -> None:
    assert message in refusals(**fields)[0]


def test_a_checkpoint_without_a_path_is_a_directory_of_the_jobs_own() -> None:
    spec = job(checkpoint={})
    assert spec.checkpoint is not None
    assert spec.checkpoint.path is None
    assert spec.canonical_json() == '{"checkpoint":{},"run":"true"}'
    assert JobSpec.model_validate_json(spec.canonical_json()) == spec


@pytest.mark.parametrize(
    ("written", "meant"), [("./out//ckpt/", "out/ckpt"), ("//ckpt/.", "/ckpt"), ("ckpt", "ckpt")]
)
def test_a_checkpoints_path_has_one_way_to_be_written(written: str, meant: str) -> None:
    assert job(checkpoint=written) == job(checkpoint={"path": meant})
