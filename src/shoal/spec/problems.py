"""From what validation found to sentences for people: every mistake, where it is, the nearest valid name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shoal.errors import SpecError
from shoal.spec.array import ArraySpec
from shoal.spec.clauses import (
    JOB_PATTERN,
    LEVEL_PATTERN,
    AfterSpec,
    CheckpointSpec,
    LogRuleSpec,
    MountSpec,
    RetrySpec,
    TopologySpec,
)
from shoal.spec.job import JobSpec
from shoal.spec.resources import (
    KIND_PATTERN,
    LABEL_PATTERN,
    ByteRange,
    CpuRange,
    GpuSpec,
    NodeRange,
    Resources,
)
from shoal.spec.service import ServiceSpec
from shoal.spec.service_clauses import (
    AFFINITY_PATTERN,
    HOST_PATTERN,
    HTTP_PATH_PATTERN,
    ORIGIN_PATTERN,
    PARTS,
    SAVE_PATTERN,
)
from shoal.spec.text import ENV_NAME_PATTERN, NAME_PATTERN
from shoal.spec.wording import either, escape, nearest, or_nearest, plural, show

MAX_PROBLEMS = 50
"""Sentences in one answer; what is beyond them is counted."""

Loc = tuple[str | int, ...]
Place = Callable[[Loc], tuple[int, str]]
"""Where a mistake at `loc` is, as (line to sort by, what to print before the sentence)."""
Spoken = Callable[[Loc], str]
"""What the person who wrote the spec calls the field at `loc`."""

Models = Mapping[tuple[str, ...], type[BaseModel]]
"""Which part of a spec stands where."""
JOB_MODELS: Models = {
    (): JobSpec,
    ("resources",): Resources,
    ("resources", "gpus"): GpuSpec,
    ("resources", "nodes"): NodeRange,
    ("resources", "cpus"): CpuRange,
    ("resources", "memory"): ByteRange,
    ("resources", "disk"): ByteRange,
    ("mounts",): MountSpec,
    ("after",): AfterSpec,
    ("array",): ArraySpec,
    ("retry",): RetrySpec,
    ("checkpoint",): CheckpointSpec,
    ("log_rules",): LogRuleSpec,
    ("topology",): TopologySpec,
}
SERVICE_MODELS: Models = {**JOB_MODELS, **PARTS, (): ServiceSpec}

_OTHER_WORDS = {
    "args": "run",
    "cmd": "run",
    "command": "run",
    "cpu": "cpus",
    "constraint": "require",
    "cwd": "workdir",
    "dependencies": "after",
    "depends_on": "after",
    "entrypoint": "run",
    "environment": "env",
    "exclude": "exclude_nodes",
    "inside": "within",
    "mem": "memory",
    "partition": "queue",
    "processes": "ranks_per_node",
    "ram": "memory",
    "node_selector": "require",
    "script": "run",
    "storage": "disk",
    "timeout": "time_limit",
    "volumes": "mounts",
    "walltime": "time_limit",
}
"""What other tools call it."""

_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "`true` or `false`",
    "bool_parsing": "`true` or `false`",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}

_PATTERNS = {
    NAME_PATTERN: "made of letters, digits, `.`, `_` and `-`, the first a letter, digit or `_`",
    ENV_NAME_PATTERN: "made of letters, digits and `_`, the first no digit",
    JOB_PATTERN: "a job such as `17`, `vision/17` or `train`",
    LEVEL_PATTERN: "a level such as `rack`",
    HTTP_PATH_PATTERN: "a path such as `/health`",
    ORIGIN_PATTERN: "an origin such as `https://app.example.org`, or `*`",
    SAVE_PATTERN: "the folder of a checkpoint such as `step-000000001000-1-0`",
    HOST_PATTERN: "a host's name in small letters, such as `chat.example.org`",
    AFFINITY_PATTERN: "`header:NAME` or `cookie:NAME`",
    LABEL_PATTERN: "a label such as `gpu_memory`",
    f"^{KIND_PATTERN}$": "a kind of GPU such as `H100`",
}


def path_of(loc: Loc) -> str:
    """`mounts[0].source`."""
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step != "[key]":
            path += f".{escape(step[:100])}"
    return path.removeprefix(".")


def sentences(
    wrong: ValidationError, place: Place, spoken: Spoken = path_of, models: Models = JOB_MODELS
) -> list[tuple[int, str]]:
    """(line, sentence) for each mistake.

    Beyond `MAX_PROBLEMS` the sentences are empty, so that a file of mistakes alone is answered quickly.
    """
    found = wrong.errors(include_url=False)
    told = [_told(error, place, spoken, models) for error in found[:MAX_PROBLEMS]]
    return told + [(0, "")] * (len(found) - len(told))


def spec_error(
    source: str, problems: Iterable[tuple[int, str]], models: Models = JOB_MODELS, *, hint: str | None = None
) -> SpecError:
    """One error with all problems in the order of their lines. `hint` None: where fields are explained."""
    ordered = [sentence for _, sentence in sorted(problems, key=lambda problem: problem[0])]
    told = [sentence for sentence in ordered if sentence][:MAX_PROBLEMS]
    if len(ordered) > len(told):
        told.append(f"{escape(source)}: and {plural(len(ordered) - len(told), 'more mistake')}")
    message = told[0] if len(told) == 1 else f"{plural(len(ordered), 'mistake')} in {escape(source)}"
    command = "run" if models[()] is JobSpec else "serve"
    look = f"see every field and its forms with `shoal {command} --help`"
    return SpecError(message, problems=tuple(told), hint=hint or look)


def _told(error: ErrorDetails, place: Place, spoken: Spoken, models: Models) -> tuple[int, str]:
    loc = error["loc"]
    line, prefix = place(loc)
    if error["type"] == "extra_forbidden":
        return line, f"{prefix}{_unknown_key(loc, models)}"
    return line, f"{prefix}{sentence(error, spoken(loc))}"


def sentence(error: ErrorDetails, name: str, patterns: Mapping[str, str] = _PATTERNS) -> str:
    """What is wrong with the field of that name. `patterns`: what texts must be that match them."""
    kind, context, value = error["type"], error.get("ctx", {}), error["input"]
    if kind == "value_error":
        return _about(name, str(context["error"]))
    if kind == "missing":
        return f"`{name}` is missing; {'write the command to run' if name == 'run' else 'it is needed here'}"
    if kind in _KINDS:
        return _wrong_kind(name, kind, value)
    if kind == "literal_error":
        return _not_a_choice(name, value, context["expected"])
    if kind == "string_pattern_mismatch":
        pattern = context["pattern"]
        return f"`{name}`: {show(value)} is not {patterns.get(pattern) or f'of the form {pattern}'}"
    return _about(name, _outside(kind, context, value) or error["msg"])


def _about(name: str, told: str) -> str:
    """What begins with a verb has the field as its subject."""
    return f"`{name}` {told}" if told.startswith(("is ", "has ", "ends ")) else f"`{name}`: {told}"


def _wrong_kind(name: str, kind: str, value: object) -> str:
    if value is None:
        return f"`{name}` has no value; give it one or remove it"
    told = f"`{name}` must be {_KINDS[kind]}, not "
    if kind == "string_type" and isinstance(value, int | float):
        return f"{told}{show(value)}; put it in quotes"
    return f"{told}the text {show(value)}" if isinstance(value, str) else f"{told}{show(value)}"


def _outside(kind: str, context: dict[str, Any], value: Any) -> str | None:
    """Sentences for what is too small, too large or unreadable."""
    match kind:
        case "greater_than":
            return f"{show(value)} is not above {context['gt']:,}"
        case "greater_than_equal":
            return f"{show(value)} is below the least, {context['ge']:,}"
        case "less_than_equal":
            return f"{show(value)} is above the most, {context['le']:,}"
        case "string_too_long":
            return f"is {len(value):,} characters long; at most {context['max_length']:,}"
        case "string_too_short":
            return "is empty"
        case "too_long":
            counted = context["actual_length"]  # None: counting ended at the most
            has = "too many elements" if counted is None else plural(counted, "element")
            return f"has {has}; at most {context['max_length']:,}"
        case "too_short":
            return "is empty"
        case "string_unicode":
            return "has half of a surrogate pair; it cannot be written as UTF-8"
        case "invalid_key":
            return "a key must be text; put it in quotes"
        case _:
            return None


def _not_a_choice(name: str, value: object, expected: str) -> str:
    choices = re.findall(r"'([^']*)'", expected)
    near = or_nearest(value, choices) if isinstance(value, str) else ""
    return f"`{name}`: {show(value)} is not {either(choices)}{near}"


def _known_word(key: str, known: list[str]) -> str | None:
    """What other tools call it, if it is a key here; else one that is written alike."""
    word = _OTHER_WORDS.get(key.lower())
    return word if word in known else nearest(key, known) or word


def _unknown_key(loc: Loc, models: Models) -> str:
    key = str(loc[-1])
    parent = tuple(step for step in loc[:-1] if isinstance(step, str))
    where = f" in `{path_of(loc[:-1])}`" if parent else ""
    told = f"unknown key {show(key)}{where}"
    known = list(models[parent].model_fields)
    meant = _known_word(key, known)
    if meant in known:
        return f"{told}; did you mean `{meant}`?"
    if not parent and (inner := nearest(meant or key, Resources.model_fields)):
        return f"{told}; `{inner}` belongs in `resources`"
    if parent and (outer := nearest(meant or key, models[()].model_fields)):
        return f"{told}; `{outer}` belongs at the top level"
    return f"{told}; the keys here are {', '.join(known)}"
