"""`shoal why`: the one dominant reason a job does not run, or how it ended."""

from __future__ import annotations

from typing import Any

from shoal.cli.flags import JobRef, JsonFlag, connect, one_job
from shoal.cli.show import print_json
from shoal.cli.text import lines_of, one_line


def why(job: JobRef, *, json: JsonFlag = False) -> int:
    """Say why a job is not running, what it waits for, or how it ended.

    The name of an array stands for its newest element.
    """
    with connect() as shoal:
        told = shoal.why(one_job(shoal, job))
    if json:
        print_json(told)
    else:
        print("\n".join(lines(told)))
    return 0


def lines(told: dict[str, Any]) -> list[str]:
    """`waiting: SENTENCE`, details indented, and what to type if there is something."""
    explanation = told.get("explanation") or {}
    sentence, *last_words = lines_of(told["sentence"])
    found = [f"waiting: {sentence}" if told["status"] == "queued" and explanation else sentence]
    found += [f"  {line}" for line in last_words]
    found += [f"  {one_line(detail)}" for detail in explanation.get("details") or ()]
    if explanation.get("hint"):
        found.append(f"hint: {one_line(explanation['hint'])}")
    return found
