"""What every server is asked and answers: 1 KB of JSON, or events that say when each was written."""

from __future__ import annotations

import json
import time

ANSWER = b'{"text":"' + b"x" * 1013 + b'"}'
NUM_EVENTS, EVERY_S = 64, 0.02
"""Of one stream."""
POST_BYTES = 4096
CHAT = "/v1/chat/completions"
"""Where a router for language models accepts a POST. The other proxies accept any path."""
WANTS_EVENTS = b'"stream":true'


def event() -> bytes:
    return b"data: %.6f %s\n\n" % (time.time(), b"t" * 40)


def chat(*, is_stream: bool = False, size: int = 0) -> bytes:
    """A body that such a router accepts, at least `size` bytes long."""

    def body(text: str) -> bytes:
        body_fields = {"model": "m", "stream": is_stream, "messages": [{"role": "user", "content": text}]}
        return json.dumps(body_fields, separators=(",", ":")).encode()

    return body("y" * max(1, size - len(body(""))))
