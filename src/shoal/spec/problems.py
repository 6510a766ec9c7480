"""Turn validation errors into sentences for people: every mistake, where it is, the nearest valid name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shoal.errors import SpecError
from shoal.spec.array import ArraySpec
from shoal.spec.error_text import either, escape, nearest, or_nearest, plural, show
from shoal.spec.job import JobSpec
from shoal.spec.job_fields import (
    JOB_PATTERN,
    LEVEL_PATTERN,
    AfterSpec,
    CheckpointSpec,
    LogRuleSpec,
    MountSpec,
    RetrySpec,
    TopologySpec,
)
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
from shoal.spec.service_fields import (
    AFFINITY_PATTERN,
    HOST_PATTERN,
    HTTP_PATH_PATTERN,
    ORIGIN_PATTERN,
    SAVE_PATTERN,
    SERVICE_FIELD_MODELS,
)
from shoal.spec.text import ENV_NAME_PATTERN, NAME_PATTERN

MAX_PROBLEMS = 50
"""Sentences in one answer. Further problems are only counted."""

Loc = tuple[str | int, ...]
Locate = Callable[[Loc], tuple[int, str]]
"""Returns the place of a mistake at `loc`: (line to sort by, text to print before the sentence)."""
NameField = Callable[[Loc], str]
"""Returns the name that the author of the spec uses for the field at `loc`."""

Models = Mapping[tuple[str, ...], type[BaseModel]]
"""The model of each part of a spec, by its path."""
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
SERVICE_MODELS: Models = {**JOB_MODELS, **SERVICE_FIELD_MODELS, (): ServiceSpec}

_OTHER_TOOLS_KEYS = {
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
"""The names of fields in other tools."""

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
    HOST_PATTERN: "a host's name in lower case, such as `chat.example.org`",
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


def problem_sentences(
    wrong: ValidationError, place: Locate, spoken: NameField = path_of, models: Models = JOB_MODELS
) -> list[tuple[int, str]]:
    """Return (line, sentence) for each mistake.

    Beyond `MAX_PROBLEMS` the sentences are empty, so that a file full of mistakes is answered quickly.
    """
    errors = wrong.errors(include_url=False)
    sentences = [_located_sentence(error, place, spoken, models) for error in errors[:MAX_PROBLEMS]]
    return sentences + [(0, "")] * (len(errors) - len(sentences))


def spec_error(
    source: str, problems: Iterable[tuple[int, str]], models: Models = JOB_MODELS, *, hint: str | None = None
) -> SpecError:
    """Return one error with all problems in the order of their lines. `hint` None: say where fields are
    explained.
    """
    ordered = [sentence for _, sentence in sorted(problems, key=lambda problem: problem[0])]
    sentences = [sentence for sentence in ordered if sentence][:MAX_PROBLEMS]
    if len(ordered) > len(sentences):
        sentences.append(f"{escape(source)}: and {plural(len(ordered) - len(sentences), 'more mistake')}")
    message = (
        sentences[0] if len(sentences) == 1 else f"{plural(len(ordered), 'mistake')} in {escape(source)}"
    )
    command = "run" if models[()] is JobSpec else "serve"
    look = f"see every field and its forms with `shoal {command} --help`"
    return SpecError(message, problems=tuple(sentences), hint=hint or look)


def _located_sentence(
    error: ErrorDetails, place: Locate, spoken: NameField, models: Models
) -> tuple[int, str]:
    loc = error["loc"]
    line, prefix = place(loc)
    if error["type"] == "extra_forbidden":
        return line, f"{prefix}{_unknown_key(loc, models)}"
    return line, f"{prefix}{problem_sentence(error, spoken(loc))}"


def problem_sentence(error: ErrorDetails, name: str, patterns: Mapping[str, str] = _PATTERNS) -> str:
    """Say what is wrong with the field of that name. `patterns`: descriptions of the texts that match each
    pattern.
    """
    kind, context, value = error["type"], error.get("ctx", {}), error["input"]
    if kind == "value_error":
        return _with_subject(name, str(context["error"]))
    if kind == "missing":
        return f"`{name}` is missing; {'write the command to run' if name == 'run' else 'it is needed here'}"
    if kind in _KINDS:
        return _wrong_kind(name, kind, value)
    if kind == "literal_error":
        return _not_a_choice(name, value, context["expected"])
    if kind == "string_pattern_mismatch":
        pattern = context["pattern"]
        return f"`{name}`: {show(value)} is not {patterns.get(pattern) or f'of the form {pattern}'}"
    return _with_subject(name, _outside(kind, context, value) or error["msg"])


def _with_subject(name: str, text: str) -> str:
    """Join the name and the text. A text that begins with a verb gets the field as its subject."""
    return f"`{name}` {text}" if text.startswith(("is ", "has ", "ends ")) else f"`{name}`: {text}"


def _wrong_kind(name: str, kind: str, value: object) -> str:
    if value is None:
        return f"`{name}` has no value; give it one or remove it"
    sentence = f"`{name}` must be {_KINDS[kind]}, not "
    if kind == "string_type" and isinstance(value, int | float):
        return f"{sentence}{show(value)}; put it in quotes"
    return f"{sentence}the text {show(value)}" if isinstance(value, str) else f"{sentence}{show(value)}"


def _outside(kind: str, context: dict[str, Any], value: Any) -> str | None:
    """Sentences for values that are too small, too large or unreadable."""
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


def _meant_key(key: str, keys: list[str]) -> str | None:
    """The key of ours that another tool's key means, else one with a similar spelling."""
    word = _OTHER_TOOLS_KEYS.get(key.lower())
    return word if word in keys else nearest(key, keys) or word


def _unknown_key(loc: Loc, models: Models) -> str:
    key = str(loc[-1])
    parent = tuple(step for step in loc[:-1] if isinstance(step, str))
    where = f" in `{path_of(loc[:-1])}`" if parent else ""
    sentence = f"unknown key {show(key)}{where}"
    fields = list(models[parent].model_fields)
    meant = _meant_key(key, fields)
    if meant in fields:
        return f"{sentence}; did you mean `{meant}`?"
    if not parent and (inner := nearest(meant or key, Resources.model_fields)):
        return f"{sentence}; `{inner}` belongs in `resources`"
    if parent and (outer := nearest(meant or key, models[()].model_fields)):
        return f"{sentence}; `{outer}` belongs at the top level"
    return f"{sentence}; the keys here are {', '.join(fields)}"
