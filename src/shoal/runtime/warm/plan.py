"""For which program a zygote makes imports, and which."""

from __future__ import annotations

import json
import os
from typing import Any

from . import context, imports

PLAN = "plan"
"""The file with what the zygote should become, written before it executes itself again."""


class ImportPlan:
    """A program as it is started, and the statements with which it begins that can be made in advance.

    `name`: as from `context.program_name`. `environment`: without the variables of a rank.
    """

    def __init__(
        self, interpreter: str, name: str, cwd: str, environment: dict[str, str], statements: list[str]
    ) -> None:
        self.interpreter = interpreter
        self.name = name
        self.cwd = cwd
        self.environment = environment
        self.statements = statements

    def signature(self) -> str:
        return context.signature(self.interpreter, self.name, self.cwd, self.environment)

    def with_only(self, count: int) -> ImportPlan:
        """Return the plan with only the first statements."""
        return ImportPlan(**{**self.as_facts(), "statements": self.statements[:count]})

    def as_facts(self) -> dict[str, Any]:
        return dict(vars(self))

    def write(self, folder: str) -> None:
        path = os.path.join(folder, PLAN)
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(self.as_facts(), file)
        os.replace(f"{path}.new", path)


def for_command(interpreter: str, arguments: list[str], cwd: str, environment: dict[str, str]) -> ImportPlan:
    """Return the plan for a command that `stand_in.is_plain` accepts."""
    argv = context.without_unbuffered(arguments)
    statements = imports.leading_imports(imports.program_sources(argv, cwd))
    return ImportPlan(
        interpreter, context.program_name(arguments, cwd), cwd, without_rank(environment), statements
    )


def without_rank(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that are the same in all ranks."""
    return {name: value for name, value in environment.items() if not context.is_of_rank(name)}


def was_written(folder: str) -> bool:
    """Whether this process was executed for a plan that it wrote itself."""
    return os.path.exists(os.path.join(folder, PLAN))


def read(folder: str) -> ImportPlan | None:
    """Return the plan that this process was executed for, None if there is none."""
    if not was_written(folder):
        return None
    with open(os.path.join(folder, PLAN), encoding="utf-8") as file:
        return ImportPlan(**json.load(file))
