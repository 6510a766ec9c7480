"""Short forms: a type that people may also write as a string or a number, in code and in JSON Schema."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True, slots=True, eq=False)
class Human:
    """Annotates a type with its short forms.

    `read` turns a short form into what the type itself takes, hands anything else through untouched,
    and raises `ValueError` with a sentence. `forms` describes the short forms as JSON Schemas.
    Compared by identity: `forms` cannot be hashed, and typing hashes annotations.
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
    """Annotates `T | str`: a name that matches `pattern` is taken as it is; all else must be a `full`."""

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
        return {"anyOf": [handler(core), text(self.pattern, *self.examples)]}


def text(pattern: str, *examples: str) -> JsonSchemaValue:
    """The JSON Schema of a string that matches `pattern` as a whole."""
    return {"type": "string", "pattern": f"^(?:{pattern})$", "examples": list(examples)}
