"""Which requests may be in two replicas: sent again when one is lost, asked of a second when one is late.

Pure. What may have had an effect is never repeated, unless somebody has said that it does no harm.
"""

from __future__ import annotations

from shoal.serving.head import CHUNKED, RequestHead
from shoal.serving.table import Balance, Service

HOLD_BYTES = 64 << 10
HOLD_PROMPT_BYTES = 1 << 20
"""How much of a body is awaited before a replica is chosen: slow senders take no slot, and what was held
can be sent again."""
SAFE = frozenset({b"GET", b"HEAD", b"OPTIONS"})
WITHOUT_EFFECT = (b"/completions", b"/embeddings")
"""How paths end at which language models answer, as OpenAI names them, and keep nothing."""


def has_prompt(head: RequestHead, service: Service) -> bool:
    return service.balance is Balance.TOKENS and head.method == b"POST"


def may_repeat(head: RequestHead, service: Service) -> bool:
    """Whether it may be sent to another replica as long as nothing was answered."""
    if head.method in SAFE or service.is_repeatable or head.value(b"idempotency-key"):
        return True
    return has_prompt(head, service) and head.target.partition(b"?")[0].endswith(WITHOUT_EFFECT)


def hold_bytes(head: RequestHead, service: Service) -> int:
    """Of the body, before a replica is chosen; none of one that may be a conversation."""
    if has_prompt(head, service) or service.is_repeatable:
        return HOLD_PROMPT_BYTES
    return 0 if head.length == CHUNKED else HOLD_BYTES


def hedge_bytes(head: RequestHead, service: Service) -> int:
    """How long a body it may have to be asked of a second replica when the first is late; -1: it never is.

    Only what a caller or its method calls harmless, and what costs little to send twice.
    """
    if not service.hedge_s or head.is_websocket:
        return -1
    if head.value(b"idempotency-key"):
        return HOLD_BYTES
    return 0 if head.method in SAFE else -1
