"""Short forms: a type that people may also write as a string or a number, in code and in JSON Schema."""

from __future__ import annotations

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


def text(pattern: str, *examples: str) -> JsonSchemaValue:
    """The JSON Schema of a string that matches `pattern` as a whole."""
    return {"type": "string", "pattern": f"^(?:{pattern})$", "examples": list(examples)}
