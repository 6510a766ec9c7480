"""Texts a spec may hold: names, commands, environment names and values, paths.

No NUL and no lone surrogate anywhere: neither survives a process's arguments or a UTF-8 file.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, Field

from shoal.globs import problem_of
from shoal.spec.human import Human
from shoal.spec.wording import show

MAX_NAME = 100
MAX_SCRIPT_BYTES = 256 << 10
MAX_PATH = 4096
MAX_ENV_STRING = 128 << 10
"""Linux's MAX_ARG_STRLEN: `execve` refuses a longer `NAME=value`, its final NUL included."""

NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"
ENV_NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"


_SURROGATE = re.compile("[\ud800-\udfff]")


def writable(text: str) -> str:
    """The text, if it can be an argument of a process and a part of a UTF-8 file."""
    if "\0" in text:
        raise ValueError(f"has a NUL character at position {text.index(chr(0))}; remove it")
    if not text.isascii() and (half := _SURROGATE.search(text)):
        raise ValueError(
            f"has half of a surrogate pair at position {half.start()}; it cannot be written as UTF-8"
        )
    return text


def _script(text: str) -> str:
    size = len(text.encode())
    if size > MAX_SCRIPT_BYTES:
        raise ValueError(
            f"is {size:,} bytes long; at most {MAX_SCRIPT_BYTES:,}. Put it in a file of `workdir`"
        )
    if not text.strip():
        raise ValueError("is empty; write a command, such as `python train.py`")
    return text


def _not_a_number(name: str) -> str:
    if name.isdigit():
        raise ValueError(f"{show(name)} would be read as a job's number; write `job-{name[:20]}`")
    return name


def path_without_dots(path: str) -> str:
    """Refuses `..`: where it leads depends on links that may change after the check."""
    if ".." in PurePosixPath(path).parts:
        raise ValueError(f"{show(path)} has `..` in it; write the path it leads to")
    return path


def absolute_path(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError(f"{show(path)} is not absolute; begin it with `/`")
    return path_without_dots(path)


_Text = Annotated[str, Field(strict=True), AfterValidator(writable)]

Name = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_NAME, pattern=NAME_PATTERN)]
JobName = Annotated[Name, AfterValidator(_not_a_number)]
Script = Annotated[
    _Text, AfterValidator(_script), Field(json_schema_extra={"minLength": 1, "maxLength": MAX_SCRIPT_BYTES})
]
EnvName = Annotated[str, Field(strict=True, min_length=1, max_length=256, pattern=ENV_NAME_PATTERN)]
Path = Annotated[
    str,
    Field(strict=True, min_length=1, max_length=MAX_PATH),
    AfterValidator(writable),
    AfterValidator(path_without_dots),
]
AbsolutePath = Annotated[
    str,
    Field(strict=True, min_length=1, max_length=MAX_PATH, json_schema_extra={"pattern": "^/"}),
    AfterValidator(writable),
    AfterValidator(absolute_path),
]


def _file_pattern(pattern: str) -> str:
    problem = problem_of(pattern)
    if problem is not None:
        raise ValueError(f"{show(pattern)} {problem}")
    return pattern


def _one_as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


FilePatterns = Annotated[
    tuple[Annotated[_Text, AfterValidator(_file_pattern), Field(json_schema_extra={"minLength": 1})], ...],
    Field(max_length=64),
    Human(_one_as_list, ({"type": "string", "minLength": 1},)),
]
Folder = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_PATH), AfterValidator(writable)]
"""A path on the submitter's machine: `..` is theirs to use."""
