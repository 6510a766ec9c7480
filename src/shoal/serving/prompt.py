"""What a prompt has in common with earlier ones: a chain of hashes over the whole conversation, in blocks.

Reads bodies of OpenAI-compatible requests just so far; anything else has no prompt and is balanced as such.
"""

from __future__ import annotations

import msgspec

from shoal.serving.balancer import ANY, Ask

BLOCK_BYTES = 512
BYTES_PER_TOKEN = 4
MAX_BLOCKS = 512
"""Of one prompt: what is beyond a quarter of a megabyte tells replicas apart no better."""


class _Body(msgspec.Struct):
    model: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_Body)


def ask_of(affinity: bytes, body: bytes) -> Ask:
    """For the balancer. Never fails: whether the body makes sense is the replica's to say."""
    if not body:
        return Ask(affinity=affinity) if affinity else ANY
    try:
        seen = _decoder.decode(body)
    except (ValueError, RecursionError):
        return Ask(affinity=affinity)
    # A list that grows at its end differs from the shorter one only in the bracket that closed it.
    prompt = bytes(seen.messages or seen.prompt or seen.input).rstrip(b']" \n')
    return Ask(
        affinity=affinity,
        chain=chain(bytes(seen.model), prompt),
        block_tokens=BLOCK_BYTES // BYTES_PER_TOKEN,
        num_tokens=len(prompt) // BYTES_PER_TOKEN,
    )


def chain(model: bytes, prompt: bytes) -> tuple[int, ...]:
    """A hash for each whole block, over everything up to its end. Means something in this process alone."""
    before = hash(model)
    found = []
    for at in range(0, min(len(prompt) - BLOCK_BYTES + 1, MAX_BLOCKS * BLOCK_BYTES), BLOCK_BYTES):
        before = hash((before, prompt[at : at + BLOCK_BYTES]))
        found.append(before)
    return tuple(found)
