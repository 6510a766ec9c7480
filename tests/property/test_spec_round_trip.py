"""A spec, its canonical text, its YAML file and its flags are the same spec. Nonsense is refused with a clear
message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jsonschema_rs
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shoal.errors import SpecError
from shoal.spec import JobSpec, job_schema, parse_job, spec_from_flags
from shoal.spec.files import read_job
from shoal.spec.parse import LOC_OF

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9._-]{0,20}", fullmatch=True)
ENV_NAMES = st.from_regex(r"[A-Z_][A-Z0-9_]{0,10}", fullmatch=True)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
SCRIPTS = TEXT.filter(lambda text: bool(text.strip()))
PATHS = st.from_regex(r"(/[a-z]{1,8}){1,3}", fullmatch=True).filter(
    lambda path: not re.match("/(proc|sys|dev)(/|$)", path)
)
CHECKPOINTS = PATHS.map(lambda path: f"/CHECKPOINTS{path}")
"""Never under a mount, because a spec refuses that."""
FENCES = st.one_of(st.integers(60, 3600), st.floats(60, 3600), st.builds("{}m".format, st.integers(1, 60)))
SECONDS = st.one_of(st.integers(1, 3600), st.floats(1, 3600), st.builds("{}m".format, st.integers(1, 60)))
RETRY_ON = st.sampled_from(["exit", "signal", "oom", "setup", "time_limit"])
BYTES = st.one_of(st.integers(1 << 20, 1 << 60), st.builds("{}GB".format, st.integers(1, 10**6)))


def in_order(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(values, values).map(lambda pair: {"min": min(pair), "max": max(pair)})


RESOURCES = st.fixed_dictionaries(
    {},
    optional={
        "gpus": st.one_of(
            st.integers(0, 1024), st.builds("{}:{}".format, st.just("H100"), st.integers(1, 8))
        ),
        "nodes": st.one_of(st.integers(1, 100_000), st.just("2..4"), in_order(st.integers(1, 100_000))),
        "cpus": st.one_of(
            st.integers(1, 100), st.floats(0.01, 100_000), st.just("4+"), in_order(st.floats(1, 99))
        ),
        "memory": st.one_of(BYTES, BYTES.map(lambda b: {"min": b}), in_order(st.integers(1 << 20, 1 << 60))),
        "disk": BYTES,
    },
)
JOBS = st.fixed_dictionaries(
    {"run": SCRIPTS},
    optional={
        "name": NAMES,
        "project": NAMES,
        "queue": NAMES,
        "priority": st.one_of(st.integers(-1000, 1000), st.sampled_from(["batch", "x-1", "a_b"])),
        "time_limit": SECONDS,
        "deadline": st.sampled_from(["6h", "14:00", "2026-11-16T08:00", "2026-11-16 08:00:30+02:00", 3600]),
        "resources": RESOURCES,
        "ranks_per_node": st.integers(1, 1024),
        "workdir": st.one_of(st.none(), st.just("."), PATHS),
        "setup": SCRIPTS,
        "env": st.dictionaries(ENV_NAMES.map(lambda name: f"E{name}"), TEXT, max_size=4),
        "secrets": st.lists(ENV_NAMES.map(lambda name: f"S{name}"), max_size=3, unique=True),
        "mounts": st.one_of(
            st.dictionaries(PATHS, PATHS, max_size=3),
            st.lists(
                st.fixed_dictionaries(
                    {"source": PATHS, "target": PATHS}, optional={"read_only": st.booleans()}
                ),
                max_size=3,
                unique_by=lambda mount: mount["target"],
            ),
        ),
        "after": st.lists(
            st.one_of(NAMES, st.integers(1, 10**9), NAMES.map(lambda n: f"{n}:ended")), max_size=3
        ),
        "array": st.one_of(
            st.integers(1, 10_000),
            st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20, unique=True),
            st.just("0-99%10"),
        ),
        "retry": st.one_of(
            st.integers(0, 1000),
            st.fixed_dictionaries(
                {"max": st.integers(0, 9)},
                optional={
                    "on": st.lists(RETRY_ON, min_size=1, max_size=6),
                    "backoff": SECONDS,
                },
            ),
        ),
        "checkpoint": st.one_of(
            CHECKPOINTS, st.fixed_dictionaries({"path": CHECKPOINTS, "interval": SECONDS})
        ),
        "log_rules": st.dictionaries(
            TEXT.filter(bool).map(re.escape), st.sampled_from(["exclude_node", "stop_retries"]), max_size=3
        ),
        "topology": st.one_of(st.just("rack"), st.fixed_dictionaries({"within": st.just("zone")})),
        "grace": SECONDS,
        "fence": FENCES,
    },
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.just(10**400),
    st.just("\ud800"),
)
NONSENSE = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELD_NAMES = st.sampled_from([*JobSpec.model_fields, "gpu", "max", "min", "on"])
# The first example loads the Unicode tables, which takes time that has nothing to do with the spec.
CALM = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
SCHEMA = jsonschema_rs.validator_for(job_schema())


@CALM
@given(JOBS)
def test_the_canonical_text_is_read_back_as_an_equal_spec_with_the_same_text(data: dict[str, Any]) -> None:
    spec = parse_job(data)
    text = spec.canonical_json()
    reread = JobSpec.model_validate_json(text)
    assert reread == spec
    assert reread.canonical_json() == text
    assert parse_job(json.loads(text)) == spec


class Writer(yaml.SafeDumper):
    """Quote what is a number to Shoal and to YAML 1.2, but text to PyYAML: `1e5`."""


def _written(writer: Writer, text: str) -> yaml.ScalarNode:
    is_number = re.fullmatch(r"[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?", text)
    return writer.represent_scalar("tag:yaml.org,2002:str", text, style='"' if is_number else None)


Writer.add_representer(str, _written)


@CALM
@given(JOBS)
@example({"run": "0E0"})
def test_a_yaml_file_means_what_the_mapping_means(data: dict[str, Any]) -> None:
    written = yaml.dump(data, Dumper=Writer, allow_unicode=True, sort_keys=False)
    # YAML cannot preserve some line breaks, so compare with what PyYAML reads back.
    if yaml.safe_load(written) == data:
        assert read_job(written.encode(), "job.yaml") == parse_job(data)


@CALM
@given(JOBS)
def test_the_order_of_keys_does_not_show_in_the_canonical_text(data: dict[str, Any]) -> None:
    assert parse_job(dict(reversed(data.items()))).canonical_json() == parse_job(data).canonical_json()


@CALM
@given(JOBS)
def test_the_published_schema_takes_every_form_that_is_read(data: dict[str, Any]) -> None:
    SCHEMA.validate(data)
    SCHEMA.validate(json.loads(parse_job(data).canonical_json()))


def problems_of(read: Callable[[], JobSpec]) -> tuple[str, ...]:
    """Return the problems; empty for a spec. Any exception other than `SpecError` fails the test."""
    try:
        read()
    except SpecError as refused:
        return refused.problems
    return ()


@CALM
@given(st.dictionaries(st.one_of(FIELD_NAMES, st.text(max_size=5)), NONSENSE, max_size=6), NONSENSE)
def test_plain_data_is_a_spec_or_a_spec_error(data: dict[str, Any], anything: Any) -> None:
    inside = {"run": "x", "resources": data}
    for attempt in (data, inside, {"run": "x", "array": anything, "env": anything}, anything):
        problems = problems_of(partial(parse_job, attempt))
        assert all(problem.isprintable() and len(problem) < 1000 for problem in problems)


MARKS = [
    ": ",
    "\n",
    "\n  ",
    "- ",
    "[",
    "]",
    "{",
    "}",
    ", ",
    "&a ",
    "*a",
    "!!str ",
    '"',
    "'",
    "|\n",
    "? ",
    "---\n",
]
YAML_PIECES = st.lists(
    st.one_of(
        FIELD_NAMES, st.text(max_size=4), st.sampled_from([*MARKS, "#", "\t", "2..4", "1e9", "~", ".nan"])
    ),
    max_size=30,
).map("".join)


@settings(CALM, max_examples=300)
@given(st.one_of(YAML_PIECES.map(lambda text: text.encode("utf-8", "replace")), st.binary(max_size=60)))
def test_any_bytes_are_a_spec_or_a_spec_error(content: bytes) -> None:
    problems = problems_of(partial(read_job, content, "job.yaml"))
    assert all(problem.startswith("job.yaml:") and problem.isprintable() for problem in problems)


ONE_WORD = sorted({*LOC_OF, "gpu"} - {"env", "secrets", "mounts", "log_rules", "after"})
REPEATED = ["env", "secrets", "mounts", "log_rules", "after"]


@CALM
@given(
    st.dictionaries(st.sampled_from(ONE_WORD), st.one_of(TEXT, st.integers(), st.none()), max_size=5),
    st.dictionaries(st.sampled_from(REPEATED), st.lists(TEXT, max_size=2), max_size=3),
)
def test_any_flags_are_a_spec_or_a_spec_error(flags: dict[str, Any], repeated: dict[str, Any]) -> None:
    problems = problems_of(partial(spec_from_flags, **flags, **repeated))
    assert all(problem.isprintable() for problem in problems)
