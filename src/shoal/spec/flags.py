"""Command-line flags to a `JobSpec`: the names of the YAML fields, those of `resources` and `retry` flat.

A flag that is None was not given. Mistakes are named by their flag, `--time-limit`, not by a path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from shoal.spec.clauses import read_checkpoint, read_retry
from shoal.spec.job import JobSpec
from shoal.spec.problems import Loc, path_of, sentences, spec_error
from shoal.spec.resources import Resources
from shoal.spec.wording import escape, nearest, show

LOC_OF: dict[str, Loc] = {
    **{name: (name,) for name in JobSpec.model_fields if name != "resources"},
    **{name: ("resources", name) for name in Resources.model_fields},
    "retry": ("retry", "max"),
    "retry_on": ("retry", "on"),
    "retry_backoff": ("retry", "backoff"),
    "checkpoint": ("checkpoint", "path"),
    "checkpoint_interval": ("checkpoint", "interval"),
}
"""Every flag, and where its value goes."""

_REPEATED = {"secrets": "secret", "mounts": "mount", "log_rules": "log_rule", "exclude_nodes": "exclude_node"}
"""Flags given once for each value are spelled in the singular."""
_SHORT_FORMS = {"retry": read_retry, "checkpoint": read_checkpoint}
_WHOLE = ("priority", "ranks_per_node", "retry")


def spec_from_flags(**flags: Any) -> JobSpec:
    """The spec these flags describe. Raises `SpecError` with every mistake, named by flag."""
    given = Given(flags)
    data: dict[str, Any] = {}
    given.put_over(data)
    problems = list(given.problems)
    try:
        spec = JobSpec.model_validate(data)
    except ValidationError as wrong:
        problems += sentences(wrong, lambda _: (0, ""), spoken_flag)
    else:
        if not problems:
            return spec
    raise spec_error("the command line", problems)


class Given:
    """The flags a person typed, read once; knows afterwards which values came from them."""

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
                self.problems.append((0, f"`{spelled(flag)}`: {wrong}"))

    def put_over(self, data: dict[str, Any]) -> None:
        """Replace what a file's data says, in place, value by value: `env` by name, lists whole."""
        for (name, *below), value in self._values.items():
            key = str(name)
            if not below:
                data[key] = value
                continue
            outer = _full_form(key, data.get(key, {}))
            # A file whose `resources` is no mapping is a mistake already: leave it there to be reported.
            if isinstance(outer, dict):
                outer[below[0]] = value
                data[key] = outer

    def has(self, loc: Loc) -> bool:
        """Whether what is at `loc` came from a flag."""
        return any(loc[:length] in self._values for length in range(1, len(loc) + 1))


def spoken_flag(loc: Loc) -> str:
    """`--gpus` for `resources.gpus`; `run` and what has no flag by its path."""
    for flag, target in LOC_OF.items():
        if target == loc[: len(target)] and flag != "run":
            return spelled(flag)
    return path_of(loc)


def spelled(flag: str) -> str:
    """As it is typed: `--time-limit`."""
    return "--" + _REPEATED.get(flag, flag).replace("_", "-")


def _full_form(name: str, value: Any) -> Any:
    """`retry: 3` as a mapping that a flag can be put over; what cannot be read is left alone."""
    try:
        return _SHORT_FORMS[name](value) if name in _SHORT_FORMS and value != {} else value
    except ValueError:
        return value


def _read(flag: str, value: Any) -> dict[Loc, Any]:
    """Where the flag's value goes, with its text as what the field takes."""
    if flag not in LOC_OF:
        meant = nearest(flag, LOC_OF)
        raise ValueError("unknown flag" + (f"; did you mean `{spelled(meant)}`?" if meant else ""))
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
    found = {}
    for pair in map(str, value):
        name, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"{show(pair)} has no `=`; write `{escape(name[:20])}=value`")
        found[name] = text
    return found


def _log_rule(rule: str) -> dict[str, str]:
    match, equals, action = rule.rpartition("=")
    if not equals:
        raise ValueError(f"{show(rule)} has no `=`; write `REGEX=exclude_node` or `REGEX=stop_retries`")
    return {"match": match, "action": action}
