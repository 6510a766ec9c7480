"""What is wrong with a request, in sentences: the field, the value that was sent, and what it may be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shoal.api.queries import CURSOR_PATTERN
from shoal.api.requests import DIGEST_PATTERN, NAME_PATTERN, TEXT_PATTERN
from shoal.spec.problems import path_of, sentence
from shoal.spec.wording import escape, or_nearest

PATTERNS = {
    NAME_PATTERN: "made of small letters, digits, `.`, `_` and `-`, at most 63, the first a letter or digit",
    TEXT_PATTERN: "one line of text",
    CURSOR_PATTERN: "a cursor: take `next_cursor` of the page before",
    DIGEST_PATTERN: "a SHA-256 digest, 64 digits of 0-9 and a-f",
}
SECRETS = "`secrets`: names of environment variables, each with a text of at most 64 KiB"
OUTSIDE = ("body", "query", "path")
FORMS = ("str", "list[str]")
"""Of a flag: which of them a value was tried as is nobody's business."""


def describe(item: Any, known: Iterable[str] = ()) -> str:
    """One thing that validation found. `known`: the fields there are. Secrets are never quoted."""
    steps = tuple(step for step in item["loc"] if step not in OUTSIDE)
    if steps[:1] == ("secrets",):
        return SECRETS
    if steps[:1] == ("flags",):
        steps = tuple(step for step in steps if step not in FORMS)
    path = path_of(steps)
    if item["type"] == "extra_forbidden":
        return f"unknown field `{path}`" + (or_nearest(str(steps[-1]), known) if len(steps) == 1 else "")
    if item["type"] == "value_error" and not path:
        return escape(str(item["ctx"]["error"]))
    return sentence(item, path or "the body", PATTERNS)[:500]
