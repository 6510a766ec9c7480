"""Job and service files: YAML with every mistake named by file and line. Nobody else here needs PyYAML."""

from __future__ import annotations

import shlex
from collections.abc import Mapping as MappingType
from pathlib import Path, PurePath
from typing import Any

from pydantic import ValidationError

from shoal.errors import SpecError
from shoal.spec.flags import Given, spoken_flag
from shoal.spec.job import JobSpec
from shoal.spec.parse import Spec
from shoal.spec.problems import JOB_MODELS, SERVICE_MODELS, Loc, Models, path_of, sentences, spec_error
from shoal.spec.service import ServiceSpec
from shoal.spec.wording import escape, show
from shoal.spec.yaml_tree import Mapping, Node, Unreadable, line_of, plain, read_tree

MAX_FILE_BYTES = 1 << 20
PROGRAMS = {".py": "python", ".sh": "sh"}
"""What runs files of these endings, which are no job files."""


def load_job(path: str | Path, flags: MappingType[str, Any] | None = None) -> JobSpec:
    """The spec in a YAML file, with command-line flags over it.

    Raises `SpecError` with every mistake of both, each as `job.yaml:12: ...` or by its flag.
    """
    return read_job(_file_bytes(Path(path), "job"), str(path), flags)


def read_job(content: bytes, source: str, flags: MappingType[str, Any] | None = None) -> JobSpec:
    """Like `load_job`, for what was read elsewhere, such as standard input; `source` names it."""
    return _read(content, source, Given(flags or {}), JobSpec, JOB_MODELS)


def load_service(path: str | Path) -> ServiceSpec:
    """The service in a YAML file. Raises `SpecError` with every mistake and its line."""
    return _read(_file_bytes(Path(path), "service"), str(path), Given({}), ServiceSpec, SERVICE_MODELS)


def _read(content: bytes, source: str, given: Given, model: type[Spec], models: Models) -> Spec:
    shown = escape(source)
    try:
        root, repeated = read_tree(_decoded(content))
        data = _top(root)
    except Unreadable as wrong:
        problem = (wrong.line, f"{shown}:{wrong.line}: {wrong.sentence}")
        raise spec_error(source, [problem], models, hint=_hint(content, source, model)) from None
    _check_kind(data, source, model)
    problems = [(line, f"{shown}:{line}: {sentence}") for line, sentence in repeated]
    problems += given.problems
    given.put_over(data)
    try:
        spec = model.model_validate(data)
    except ValidationError as wrong:

        def place(loc: Loc) -> tuple[int, str]:
            if given.has(loc):
                return 0, ""
            line = line_of(root, loc) if root else 1
            return line, f"{shown}:{line}: "

        def spoken(loc: Loc) -> str:
            return spoken_flag(loc) if given.has(loc) else path_of(loc)

        problems += sentences(wrong, place, spoken, models)
    else:
        if not problems:
            return spec
    raise spec_error(source, problems, models, hint=_hint(content, source, model))


def _hint(content: bytes, source: str, model: type[JobSpec | ServiceSpec]) -> str | None:
    """What to type for a program that was given in place of a file that says how it is run."""
    path = PurePath(source)
    runner = _interpreter(content) or PROGRAMS.get(path.suffix)
    if runner is None:
        return None
    typed = escape(f"{runner} {shlex.quote(source)}")
    if model is not JobSpec:
        beside = escape(str(path.with_suffix(".yaml")))
        return f"write `run: exec {typed}` and a `name` into {beside}, and `shoal serve` that"
    told = f"a program is run with `shoal run -- {typed}`"
    if b"\n#SBATCH" in content:
        told += (
            "; its `#SBATCH` lines are not read: say `--nodes`, `--gpus` and `--time-limit` before the `--`"
        )
    return told


def _interpreter(content: bytes) -> str | None:
    """The name of the program in a first line such as `#!/usr/bin/env python3`."""
    first = content[:200].split(b"\n")[0].decode("utf-8", "replace")
    if not first.startswith("#!"):
        return None
    words = [word for word in first[2:].split() if not word.startswith("-")]
    names = [word.rpartition("/")[2] for word in words]
    return next((name for name in names if name != "env"), None)


def _check_kind(data: MappingType[str, Any], source: str, model: type[JobSpec | ServiceSpec]) -> None:
    """A file of the other kind has one mistake, whatever its fields: it was given to the wrong command.

    One that does not say its kind is known by a field that only the other kind has.
    """
    is_job = model is JobSpec
    other = (ServiceSpec if is_job else JobSpec).model_fields
    what, command, this = ("service", "serve", "run") if is_job else ("job", "run", "serve")
    own = [key for key in data if key in other and key not in model.model_fields]
    if data.get("kind") == what:
        seen = f"it says `kind: {what}`"
    elif "kind" not in data and own:
        seen = f"only a {what} has `{own[0]}`"
    else:
        return
    raise SpecError(
        f"{show(source)} is a {what} file ({seen}); `shoal {this}` is for {'jobs' if is_job else 'services'}",
        hint=f"type `shoal {command} {escape(source)}`",
    )


def _top(root: Node | None) -> dict[str, Any]:
    """The file's data. Values under `env` are taken as written: `0.10` and `yes` are text there."""
    if root is None:
        return {}
    if not isinstance(root, Mapping):
        raise Unreadable(
            root.line,
            f"a job file is a mapping that begins with a key such as `run:`, not {show(plain(root))}",
        )
    return {key: plain(node, as_written=key == "env") for key, (_, node) in root.items.items()}


def _file_bytes(path: Path, kind: str) -> bytes:
    """At most one byte more than a job file may have, so that a device or a huge file ends too."""
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
        raise Unreadable(
            1, f"larger than {MAX_FILE_BYTES:,} bytes, the most a job file has; move data into `workdir`"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        line = content.count(b"\n", 0, wrong.start) + 1
        raise Unreadable(line, f"byte {wrong.start:,} is not UTF-8; save the file as UTF-8") from None
