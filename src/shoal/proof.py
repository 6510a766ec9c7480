"""How the control plane proves that it, and nobody else on its port, answered a renewal.

Apart from `wire` because it needs OpenSSL, for which a supervisor's ranks do not wait. The key goes to the
supervisor on its pipe and never over the network: whoever listens on the port does not learn it.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from shoal.wire import Renewal, RenewalAnswer


def prove(key: str, renewal: Renewal, answer: RenewalAnswer) -> RenewalAnswer:
    """The answer with a proof that holds for this renewal alone, by its nonce."""
    return msgspec.structs.replace(answer, proof=_mac(key, renewal, answer))


def is_proven(key: str, renewal: Renewal, answer: RenewalAnswer) -> bool:
    """Whether a holder of `key` gave exactly this answer to exactly this renewal."""
    if not key or not renewal.nonce:
        return False
    return hmac.compare_digest(_mac(key, renewal, answer).encode(), answer.proof.encode())


def _mac(key: str, renewal: Renewal, answer: RenewalAnswer) -> str:
    asked = (renewal.attempt_id, renewal.epoch, renewal.node, renewal.nonce)
    told = (answer.is_stale, answer.should_stop, float(answer.grace_s), answer.because)
    text = msgspec.json.encode(("shoal-renewal", *asked, *told))
    return hmac.new(key.encode(), text, hashlib.sha256).hexdigest()
