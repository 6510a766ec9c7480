"""The imports of one program, made in this process: for which starts they count, and what they changed."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import sys
from typing import Any

from . import context, imports, launchers, plan, program
from .preload import Preload


class Image:
    """Call `prepare` once, before anything is forked. Then `refusal` judges each request."""

    def __init__(self, folder: str, interpreter: str, shoal: str) -> None:
        self._folder = folder
        self._interpreter = interpreter
        """The command of this process, which may be a script that finds the interpreter."""
        self._own = _started_with()
        self._plan: plan.ImportPlan | None = None
        self._preload = Preload([*imports.trusted_folders(sys.path), folder, shoal], context.is_of_rank)
        self.changes: dict[str, str | None] = {}
        """The variables that the imports have set, or removed (None)."""

    def prepare(self, planned: plan.ImportPlan | None, expected: dict[str, str] | None) -> None:
        """Make the imports. May execute this process again, as another interpreter or with fewer imports.

        `SystemExit`: the result differs from the `expected` modules, so this is no standby.
        """
        is_ours = planned is not None and self._is_for(planned) and not getattr(sys.flags, "safe_path", False)
        if planned is None or not planned.statements or not is_ours:
            if planned is not None and planned.statements and not plan.was_written(self._folder):
                self.become(planned)
            self._write(launchers.KNOWN, "")
            return
        self._plan = planned
        if (
            expected is None
        ):  # a standby must not be in the task's directory, or it would be killed with the task
            os.chdir(planned.cwd)
        self._write(launchers.KNOWN, planned.signature())
        self._import(planned)
        if expected is not None:
            self._compare(expected)
        gc.collect()
        gc.freeze()
        self._write_image(planned)

    def become(self, planned: plan.ImportPlan) -> None:
        """Execute this process again, as a zygote for this plan. `OSError`: it stays what it is."""
        planned.write(self._folder)
        for name in (launchers.KNOWN, "socket"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._folder, name))
        with open("/proc/self/cmdline", "rb") as file:
            argv = [os.fsdecode(word) for word in file.read().split(b"\0")[1:-2]]
        # Shoal finds the processes of a task by their variables, so this process keeps its own.
        ours = {name: value for name, value in self._own.items() if context.is_of_rank(name)}
        command = [planned.interpreter, *argv, planned.interpreter]
        os.execve(command[0], command, {**ours, **planned.environment})  # noqa: S606

    def refusal(self, request: dict[str, Any]) -> str | None:
        """Return why a fork of this process could differ from a start of the program. None: it does not."""
        made = self._plan
        if made is None:
            return "no imports were made for it in advance"
        now = plan.for_command(request["interpreter"], request["arguments"], request["cwd"], request["env"])
        if (now.interpreter, now.name, now.cwd) != (made.interpreter, made.name, made.cwd):
            return f"{made.name} has been prepared, and {now.name} starts"
        if now.environment != made.environment:
            return f"{now.name} starts with other variables than before"
        if now.statements[: len(made.statements)] != made.statements:
            return f"{now.name} begins with other imports than before"
        path = self._preload.changed()
        return None if path is None else f"{path} has changed"

    def _is_for(self, planned: plan.ImportPlan) -> bool:
        variables = plan.without_rank(self._own)
        return planned.interpreter == self._interpreter and planned.environment == variables

    def _import(self, planned: plan.ImportPlan) -> None:
        for name in filter(context.is_of_rank, dict(os.environ)):
            del os.environ[name]
        before = dict(os.environ)
        program.take_place(planned.name, planned.cwd)
        count = self._preload.make(planned.statements, [planned.name])
        after = dict(os.environ)
        changed = {name for name in before.keys() | after if before.get(name) != after.get(name)}
        if any(map(context.is_of_rank, changed)):
            count, self._preload.problem = 0, f"they set {', '.join(sorted(changed))}"
        if self._preload.problem:
            sys.stderr.write(f"shoal: imports are left to the ranks: {self._preload.problem}\n")
            self.become(planned.with_only(count))
        self.changes = {name: after.get(name) for name in changed}

    def _compare(self, expected: dict[str, str]) -> None:
        differing = program.differing_modules(expected, self._folder)
        if differing:
            few = ", ".join(differing[:5])
            sys.exit(f"shoal: no standby: other modules than those of the ranks are found here ({few})")

    def _write_image(self, planned: plan.ImportPlan) -> None:
        """Write what this process has imported, for a standby that should import the same."""
        image = {
            "modules": program.loaded_modules(self._folder),
            "plan": planned.as_facts(),
            "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        self._write(launchers.IMAGE, json.dumps(image))

    def _write(self, name: str, text: str) -> None:
        path = os.path.join(self._folder, name)
        with open(f"{path}.new", "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
        os.replace(f"{path}.new", path)


def _started_with() -> dict[str, str]:
    """Return the variables with which this process was started. Python itself may add `LC_CTYPE` to them."""
    with open("/proc/self/environ", "rb") as file:
        variables = [os.fsdecode(word) for word in file.read().split(b"\0")]
    return dict(word.split("=", 1) for word in variables if "=" in word)
