"""Texts of a spec: names, commands, environment names and values, paths, and short forms.

`ShortForms` marks a type that people may also write as a string or a number, in code and in JSON Schema. No
text holds NUL or a lone surrogate, because neither survives a process's arguments or a UTF-8 file.

`checked_pattern` checks whether a text looks like a regular expression, without compiling it. The control
plane compiles no pattern that a person sent, because 60 KB of them would block it for seconds. The job's
supervisor compiles them, in CPU time of the job, and reports what this one pass does not see.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from shoal.globs import problem_of
from shoal.spec.error_text import show


@dataclass(frozen=True, slots=True, eq=False)
class ShortForms:
    """Annotates a type with its short forms.

    `read` turns a short form into what the type itself takes, returns anything else unchanged, and raises
    `ValueError` with a sentence. `forms` describes the short forms as JSON Schemas. Compared by identity:
    `forms` cannot be hashed, and typing hashes annotations.
    """

    read: Callable[[Any], Any]
    forms: tuple[JsonSchemaValue, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.read, handler(source))

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        full = handler(core)
        return {"anyOf": [full, *self.forms]} if self.forms else full


@dataclass(frozen=True, slots=True, eq=False)
class OrName:
    """Annotates `Item | str`: a name that matches `pattern` is taken as it is. Every other value must be a
    `full`.
    """

    pattern: str
    full: Any
    examples: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def read(value: Any, otherwise: core_schema.ValidatorFunctionWrapHandler) -> Any:
            is_name = isinstance(value, str) and re.fullmatch(self.pattern, value) is not None
            return value if is_name else otherwise(value)

        as_it_is = core_schema.plain_serializer_function_ser_schema(lambda value: value)
        full = handler.generate_schema(self.full)
        return core_schema.no_info_wrap_validator_function(read, full, serialization=as_it_is)

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [handler(core), text_schema(self.pattern, *self.examples)]}


def text_schema(pattern: str, *examples: str) -> JsonSchemaValue:
    """The JSON Schema of a string that matches `pattern` as a whole."""
    return {"type": "string", "pattern": f"^(?:{pattern})$", "examples": list(examples)}


MAX_DEPTH = 100
MAX_REPEATS = 1_000_000_000
_REPEATS = re.compile(r"\{(\d{0,20})(?:,(\d{0,20}))?\}")
_HAS_COMMENTS = re.compile(r"\(\?(?:#|[a-zA-Z]*x)")
_REPEATERS = "*+?"
_NOTHING = ("(", "|", "^(", "")


def checked_pattern(pattern: str) -> str:
    """Return `pattern`. Raises `ValueError` with what is wrong with it."""
    wrong = _mistake(pattern) if not _HAS_COMMENTS.search(pattern) else None
    if wrong is not None:
        raise ValueError(f"{show(pattern)} is not a regular expression: {wrong}")
    return pattern


def _mistake(pattern: str) -> str | None:
    at, depth, before = 0, 0, ""
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            if at + 1 == len(pattern):
                return "a backslash at its end"
            at += 1
        elif char == "[":
            end = _class_end(pattern, at)
            if end is None:
                return f"`[` at {at} is not closed"
            at = end
        elif char == "(":
            depth += 1
            if depth > MAX_DEPTH:
                return f"it is nested too deeply, more than {MAX_DEPTH} times"
            if pattern[at + 1 : at + 2] == "?":
                at += 1  # an extension, and not a repeat
        elif char == ")":
            depth -= 1
            if depth < 0:
                return f"`)` at {at} closes nothing"
        elif char in _REPEATERS and before in _NOTHING:
            return f"nothing to repeat before `{char}` at {at}"
        elif char == "{" and _repeats(pattern, at) > MAX_REPEATS:
            return f"more than {MAX_REPEATS} repeats at {at}"
        before = char
        at += 1
    return "`(` is not closed" if depth else None


def _repeats(pattern: str, at: int) -> int:
    """The largest count of the repeat that begins there; 0 if there is none."""
    counts = _REPEATS.match(pattern, at)
    return max((int(count) for count in counts.groups() if count), default=0) if counts else 0


def _class_end(pattern: str, start: int) -> int | None:
    """The end of the character set that begins at `start`. Its first character may be `]`."""
    at = start + 1
    if pattern[at : at + 1] == "^":
        at += 1
    if pattern[at : at + 1] == "]":
        at += 1
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "]":
            return at
        at += 1
    return None


MAX_NAME = 100
MAX_SCRIPT_BYTES = 256 << 10
MAX_PATH = 4096
MAX_ENV_STRING = 128 << 10
"""Linux's MAX_ARG_STRLEN: `execve` refuses a longer `NAME=value`, its final NUL included."""

NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"
ENV_NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"


_SURROGATE = re.compile("[\ud800-\udfff]")


def writable(text: str) -> str:
    """Return the text, if it can be an argument of a process and a part of a UTF-8 file."""
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
    """Refuse `..`: its target depends on links that may change after the check."""
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
    ShortForms(_one_as_list, ({"type": "string", "minLength": 1},)),
]
Folder = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_PATH), AfterValidator(writable)]
"""A path on the submitter's machine, so `..` is allowed."""
