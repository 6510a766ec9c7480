"""Job and service files: YAML with every mistake named by file and line. No other module here
needs PyYAML.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping as MappingType
from pathlib import Path, PurePath
from typing import Any

from pydantic import ValidationError

from shoal.errors import SpecError
from shoal.spec.error_text import escape, show
from shoal.spec.job import JobSpec
from shoal.spec.parse import FlagValues, Spec, flag_name_of
from shoal.spec.problems import (
    JOB_MODELS,
    SERVICE_MODELS,
    Loc,
    Models,
    path_of,
    problem_sentences,
    spec_error,
)
from shoal.spec.service import ServiceSpec
from shoal.spec.yaml_tree import UnreadableYaml, YamlMapping, YamlNode, line_of, plain_data, read_tree

MAX_FILE_BYTES = 1 << 20
PROGRAMS = {".py": "python", ".sh": "sh"}
"""The programs that run files with these endings. Such files are no job files."""


def load_job(path: str | Path, flags: MappingType[str, Any] | None = None) -> JobSpec:
    """Read the spec in a YAML file, with command-line flags over it.

    Raises `SpecError` with every mistake of both, each as `job.yaml:12: ...` or by its flag.
    """
    return read_job(_file_bytes(Path(path), "job"), str(path), flags)


def read_job(content: bytes, source: str, flags: MappingType[str, Any] | None = None) -> JobSpec:
    """Like `load_job`, for text from another source, such as standard input. `source` names it."""
    return _read(content, source, FlagValues(flags or {}), JobSpec, JOB_MODELS)


def load_service(path: str | Path) -> ServiceSpec:
    """Read the service in a YAML file. Raises `SpecError` with every mistake and its line."""
    return _read(_file_bytes(Path(path), "service"), str(path), FlagValues({}), ServiceSpec, SERVICE_MODELS)


def _read(content: bytes, source: str, flag_values: FlagValues, model: type[Spec], models: Models) -> Spec:
    shown = escape(source)
    try:
        root, repeated = read_tree(_decoded(content))
        data = _top(root)
    except UnreadableYaml as wrong:
        problem = (wrong.line, f"{shown}:{wrong.line}: {wrong.sentence}")
        raise spec_error(source, [problem], models, hint=_hint(content, source, model)) from None
    _check_kind(data, source, model)
    problems = [(line, f"{shown}:{line}: {sentence}") for line, sentence in repeated]
    problems += flag_values.problems
    flag_values.put_over(data)
    try:
        spec = model.model_validate(data)
    except ValidationError as wrong:

        def place(loc: Loc) -> tuple[int, str]:
            if flag_values.has(loc):
                return 0, ""
            line = line_of(root, loc) if root else 1
            return line, f"{shown}:{line}: "

        def spoken(loc: Loc) -> str:
            return flag_name_of(loc) if flag_values.has(loc) else path_of(loc)

        problems += problem_sentences(wrong, place, spoken, models)
    else:
        if not problems:
            return spec
    raise spec_error(source, problems, models, hint=_hint(content, source, model))


def _hint(content: bytes, source: str, model: type[JobSpec | ServiceSpec]) -> str | None:
    """What to type if a person gave a program in place of a job file."""
    path = PurePath(source)
    runner = _interpreter(content) or PROGRAMS.get(path.suffix)
    if runner is None:
        return None
    typed = escape(f"{runner} {shlex.quote(source)}")
    if model is not JobSpec:
        beside = escape(str(path.with_suffix(".yaml")))
        return f"write `run: exec {typed}` and a `name` into {beside}, and type `shoal serve` with it"
    hint = f"run a program with `shoal run -- {typed}`"
    if b"\n#SBATCH" in content:
        hint += (
            "; its `#SBATCH` lines are not read: give `--nodes`, `--gpus` and `--time-limit` before the `--`"
        )
    return hint


def _interpreter(content: bytes) -> str | None:
    """The name of the program in a first line such as `#!/usr/bin/env python3`."""
    first = content[:200].split(b"\n")[0].decode("utf-8", "replace")
    if not first.startswith("#!"):
        return None
    arguments = [word for word in first[2:].split() if not word.startswith("-")]
    names = [word.rpartition("/")[2] for word in arguments]
    return next((name for name in names if name != "env"), None)


def _check_kind(data: MappingType[str, Any], source: str, model: type[JobSpec | ServiceSpec]) -> None:
    """Refuse a file of the other kind with one mistake, whatever its fields: it was given to the wrong
    command.

    A file without a `kind` is recognised by a field that only the other kind has.
    """
    is_job = model is JobSpec
    other = (ServiceSpec if is_job else JobSpec).model_fields
    what, command, used = ("service", "serve", "run") if is_job else ("job", "run", "serve")
    misplaced = [key for key in data if key in other and key not in model.model_fields]
    if data.get("kind") == what:
        seen = f"it says `kind: {what}`"
    elif "kind" not in data and misplaced:
        seen = f"only a {what} has `{misplaced[0]}`"
    else:
        return
    raise SpecError(
        f"{show(source)} is a {what} file ({seen}); `shoal {used}` is for {'jobs' if is_job else 'services'}",
        hint=f"type `shoal {command} {escape(source)}`",
    )


def _top(root: YamlNode | None) -> dict[str, Any]:
    """The file's data. Values under `env` are taken as written: `0.10` and `yes` are text there."""
    if root is None:
        return {}
    if not isinstance(root, YamlMapping):
        raise UnreadableYaml(
            root.line,
            f"a job file is a mapping that begins with a key such as `run:`, not {show(plain_data(root))}",
        )
    return {key: plain_data(node, as_written=key == "env") for key, (_, node) in root.items.items()}


def _file_bytes(path: Path, kind: str) -> bytes:
    """Read at most one byte more than a job file may have, so that reading a device or a huge
    file ends too.
    """
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as wrong:
        why = wrong.strerror if isinstance(wrong, OSError) and wrong.strerror else str(wrong)
        raise SpecError(
            f"cannot read the {kind} file {show(str(path))}: {why}",
            hint="list the files here with `ls *.yaml`",
        ) from None


def _decoded(content: bytes) -> str:
    if len(content) > MAX_FILE_BYTES:
        raise UnreadableYaml(
            1, f"larger than {MAX_FILE_BYTES:,} bytes, the most a job file has; move data into `workdir`"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        line = content.count(b"\n", 0, wrong.start) + 1
        raise UnreadableYaml(line, f"byte {wrong.start:,} is not UTF-8; save the file as UTF-8") from None
