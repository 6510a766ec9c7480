"""Answers of the data plane's own, as HAProxy's configuration says them. Pure; texts are ours alone."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.serving.problem import Refused, document

_KIND = "application/problem+json"
BY_ITSELF = (
    Refused(400, "request.malformed", "the request is not HTTP/1.1 that has one meaning"),
    Refused(408, "request.slow", "the request comes too slowly"),
    Refused(500, "plane.failed", "the data plane failed"),
    Refused(
        502,
        "replica.lost",
        "the replica gave no answer; a request that changes something may have had an effect",
    ),
    Refused(503, "service.busy", "no replica could take the request", retry_s=5.0),
    Refused(504, "replica.late", "the replica did not answer in time"),
)
"""What HAProxy answers where no rule of ours does."""


def errors() -> Iterator[str]:
    for refused in BY_ITSELF:
        yield f"    http-error status {refused.status} {_answer(refused)}"


def refusal(refused: Refused, condition: str) -> str:
    return f"    http-request return status {refused.status} {_answer(refused)} if {condition}"


def _answer(refused: Refused) -> str:
    body = document(refused).decode()
    assert "'" not in body
    headers = ["hdr cache-control no-store"]
    if refused.status == 401:
        headers.append("hdr www-authenticate 'Bearer realm=\"shoal\"'")
    if refused.retry_s is not None:
        headers.append(f"hdr retry-after {max(1, round(refused.retry_s))}")
    return f"content-type {_KIND} string '{body}' {' '.join(headers)}"
