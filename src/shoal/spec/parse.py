"""Plain data to a `JobSpec` or a `ServiceSpec`: for the SDK and the API, whose data has paths but no lines.

Flags of `shoal run` have the names of the YAML fields, those of `resources` and `retry` flat. A flag that is
None was not given. Mistakes are named by their flag, `--time-limit`, not by a path.

The published JSON Schemas of a job and of its flags serve editors, and generated requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.json_schema import GenerateJsonSchema

from shoal.spec.error_text import escape, nearest, show
from shoal.spec.job import JobSpec
from shoal.spec.job_fields import read_checkpoint, read_retry
from shoal.spec.problems import (
    JOB_MODELS,
    SERVICE_MODELS,
    Loc,
    Models,
    path_of,
    problem_sentences,
    spec_error,
)
from shoal.spec.resources import Resources
from shoal.spec.service import ServiceSpec

Spec = TypeVar("Spec", JobSpec, ServiceSpec)


def parse_job(data: Mapping[str, Any], source: str = "request") -> JobSpec:
    """Return the spec in `data`, short forms included. Raises `SpecError` with every mistake,
    named by path.
    """
    return _parsed(data, source, JobSpec, JOB_MODELS)


def parse_service(data: Mapping[str, Any], source: str = "request") -> ServiceSpec:
    """The same for a service."""
    return _parsed(data, source, ServiceSpec, SERVICE_MODELS)


def _parsed(data: Mapping[str, Any], source: str, model: type[Spec], models: Models) -> Spec:
    if not isinstance(data, Mapping):
        what = "job" if model is JobSpec else "service"
        raise spec_error(
            source, [(0, f"{source}: a {what} must be a mapping with `run`, not {show(data)}")], models
        )
    try:
        return model.model_validate(dict(data))
    except ValidationError as wrong:
        prefix = f"{source}: "

        def place(_: Loc) -> tuple[int, str]:
            return 0, prefix

        raise spec_error(source, problem_sentences(wrong, place, models=models), models) from None


LOC_OF: dict[str, Loc] = {
    **{name: (name,) for name in JobSpec.model_fields if name != "resources"},
    **{name: ("resources", name) for name in Resources.model_fields},
    "retry": ("retry", "max"),
    "retry_on": ("retry", "on"),
    "retry_backoff": ("retry", "backoff"),
    "checkpoint": ("checkpoint", "path"),
    "checkpoint_interval": ("checkpoint", "interval"),
}
"""Every flag, and the location of its value."""

_REPEATED = {"secrets": "secret", "mounts": "mount", "log_rules": "log_rule", "exclude_nodes": "exclude_node"}
"""Flags given once for each value are spelled in the singular."""
_SHORT_FORMS = {"retry": read_retry, "checkpoint": read_checkpoint}
_WHOLE = ("priority", "ranks_per_node", "retry")


def spec_from_flags(**flags: Any) -> JobSpec:
    """Return the spec that these flags describe. Raises `SpecError` with every mistake, named by flag."""
    given = FlagValues(flags)
    data: dict[str, Any] = {}
    given.put_over(data)
    problems = list(given.problems)
    try:
        spec = JobSpec.model_validate(data)
    except ValidationError as wrong:
        problems += problem_sentences(wrong, lambda _: (0, ""), flag_name_of)
    else:
        if not problems:
            return spec
    raise spec_error("the command line", problems)


class FlagValues:
    """The flags that a person typed, read once. It remembers which values came from them."""

    def __init__(self, flags: Mapping[str, Any]) -> None:
        self.problems: list[tuple[int, str]] = []
        """(0, sentence) for each flag that could not be read."""
        self._values: dict[Loc, Any] = {}
        for flag, value in flags.items():
            if value is None or value in ((), []):
                continue
            try:
                self._values.update(_read(flag, value))
            except ValueError as wrong:
                self.problems.append((0, f"`{typed_flag(flag)}`: {wrong}"))

    def put_over(self, data: dict[str, Any]) -> None:
        """Replace values of a file's data in place: `env` by name, lists whole."""
        for (name, *below), value in self._values.items():
            key = str(name)
            if not below:
                data[key] = value
                continue
            outer = _full_form(key, data.get(key, {}))
            # A file whose `resources` is no mapping has a mistake already. Leave it there to be reported.
            if isinstance(outer, dict):
                outer[below[0]] = value
                data[key] = outer

    def has(self, loc: Loc) -> bool:
        """Whether what is at `loc` came from a flag."""
        return any(loc[:length] in self._values for length in range(1, len(loc) + 1))


def flag_name_of(loc: Loc) -> str:
    """`--gpus` for `resources.gpus`. `run` and fields without a flag are named by their path."""
    for flag, target in LOC_OF.items():
        if target == loc[: len(target)] and flag != "run":
            return typed_flag(flag)
    return path_of(loc)


def typed_flag(flag: str) -> str:
    """The flag as it is typed: `--time-limit`."""
    return "--" + _REPEATED.get(flag, flag).replace("_", "-")


def _full_form(name: str, value: Any) -> Any:
    """Turn `retry: 3` into a mapping that a flag can override. Unreadable values stay as they are."""
    try:
        return _SHORT_FORMS[name](value) if name in _SHORT_FORMS and value != {} else value
    except ValueError:
        return value


def _read(flag: str, value: Any) -> dict[Loc, Any]:
    """Return the location of the flag's value, and the value as the field takes it."""
    if flag not in LOC_OF:
        meant = nearest(flag, LOC_OF)
        raise ValueError("unknown flag" + (f"; did you mean `{typed_flag(meant)}`?" if meant else ""))
    if flag == "env":
        return {("env", name): text for name, text in _pairs(value).items()}
    if flag == "require":
        return {LOC_OF[flag]: _pairs(value)}
    if flag == "workdir" and value == "":
        return {("workdir",): None}
    if flag == "log_rules":
        value = [_log_rule(rule) if isinstance(rule, str) else rule for rule in value]
    elif flag in _WHOLE and isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value):
        value = int(value)
    return {LOC_OF[flag]: list(value) if isinstance(value, tuple) else value}


def _pairs(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{show(value)} is not a list of `NAME=value`")  # noqa: TRY004 - a mistake in a spec
    pairs = dict[str, Any]()
    for pair in map(str, value):
        name, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"{show(pair)} has no `=`; write `{escape(name[:20])}=value`")
        pairs[name] = text
    return pairs


def _log_rule(rule: str) -> dict[str, str]:
    match, equals, action = rule.rpartition("=")
    if not equals:
        raise ValueError(f"{show(rule)} has no `=`; write `REGEX=exclude_node` or `REGEX=stop_retries`")
    return {"match": match, "action": action}


class _WithoutTitles(GenerateJsonSchema):
    """Leaves out titles: `title: Min` beside `min` adds nothing."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema of a job, a new object each time.

    `parse_job` reads whatever the schema accepts, except for rules that JSON Schema cannot express: that a
    range's ends are in order, that a regular expression compiles, that an amount in words is within its
    bounds.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **JobSpec.model_json_schema(mode="validation", schema_generator=_WithoutTitles),
        "title": "Shoal job",
    }


def service_schema() -> dict[str, Any]:
    """The same for a service and `parse_service`."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **ServiceSpec.model_json_schema(mode="validation", schema_generator=_WithoutTitles),
        "title": "Shoal service",
    }


def flags_schema() -> dict[str, Any]:
    """A job as the flags of `shoal run`: each value is the typed text, or a list of such texts."""
    return {
        "type": "object",
        "propertyNames": {"enum": list(LOC_OF)},
        "additionalProperties": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
        },
        "required": ["run"],
        "title": "Shoal job as flags",
    }
