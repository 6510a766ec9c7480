"""How a supervisor signs its renewals, and how the control plane proves that it answered one.

Apart from `wire` because it needs OpenSSL, for which a supervisor's ranks do not wait. The key goes to the
supervisor on its pipe and never over the network: whoever listens on the port does not learn it. What that
one does learn, a signed renewal, can only be said again, and says nothing new.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from shoal.wire import DrillOrder, Renewal, RenewalAnswer


def sign(key: str, renewal: Renewal, body: bytes) -> str:
    """The token that carries exactly this body, once or often: it is good for no other."""
    digest = hashlib.sha256(body).hexdigest()
    return f"shs_{renewal.attempt_id}.{renewal.node}_{digest}_{signature(key, digest)}"


def signature(key: str, digest: str) -> str:
    """Of a body with this digest. The key is of one attempt on one node, so it need not name them."""
    return hmac.new(key.encode(), f"shoal-asked\0{digest}".encode(), hashlib.sha256).hexdigest()


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
    group = (answer.generation, answer.master_port)
    # Only where there is one: either side may be older than drills and sleep.
    drill = () if answer.drill is None else (_order(answer.drill),)
    sleep = () if answer.should_sleep is None else ({"should_sleep": answer.should_sleep},)
    text = msgspec.json.encode(("shoal-renewal", *asked, *told, *group, *drill, *sleep))
    return hmac.new(key.encode(), text, hashlib.sha256).hexdigest()


def _order(drill: DrillOrder) -> dict[str, object]:
    """As supervisors have it that know nothing of generations: answers must count for them as well. Whoever
    changes that number on the way does no more harm than one who drops the message.
    """
    return {"drill_id": drill.drill_id, "act": drill.act, "rank": drill.rank, "for_s": drill.for_s}
