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

VERSION = 3
"""1 knows nothing of a drill's generation, nor of `is_after_hang`; 2 nothing of `control_urls`; 3 covers the
whole answer."""
KNOWS_GROUPS, NAMES_OTHERS = 2, 3


def sign(key: str, renewal: Renewal, body: bytes) -> str:
    """The token that carries exactly this body, once or often: it is good for no other."""
    return sign_for(key, renewal.attempt_id, renewal.node, body)


def sign_for(key: str, attempt_id: str, node: str, body: bytes) -> str:
    """The same for whatever the share of this attempt on this node says."""
    digest = hashlib.sha256(body).hexdigest()
    return f"shs_{attempt_id}.{node}_{digest}_{signature(key, digest)}"


def signature(key: str, digest: str) -> str:
    """Of a body with this digest. The key is of one attempt on one node, so it need not name them."""
    return hmac.new(key.encode(), f"shoal-asked\0{digest}".encode(), hashlib.sha256).hexdigest()


def prove(key: str, renewal: Renewal, answer: RenewalAnswer) -> RenewalAnswer:
    """The answer with a proof that holds for this renewal alone, by its nonce.

    In the newest version that the asker knows: one that is older would take another for a stranger's, and is
    told nothing that its version does not cover.
    """
    version = min(renewal.proof_version, VERSION)
    if version < NAMES_OTHERS:
        answer = msgspec.structs.replace(answer, control_urls=())
    return msgspec.structs.replace(answer, proof=_mac(key, renewal, answer, version))


def is_proven(key: str, renewal: Renewal, answer: RenewalAnswer) -> bool:
    """Whether a holder of `key` gave exactly this answer to exactly this renewal.

    An older control plane proves less, and says no more than that. Nobody else has such a proof of an answer
    to one who asked for a newer: the question is signed.
    """
    if not key or not renewal.nonce:
        return False
    versions = range(_least(answer), VERSION + 1)
    macs = [_mac(key, renewal, answer, version) for version in versions]
    return any(hmac.compare_digest(mac.encode(), answer.proof.encode()) for mac in macs)


def _least(answer: RenewalAnswer) -> int:
    """The first version that covers all of it."""
    if answer.control_urls:
        return NAMES_OTHERS
    says_no_more = not answer.is_after_hang and (answer.drill is None or answer.drill.generation is None)
    return 1 if says_no_more else KNOWS_GROUPS


def _mac(key: str, renewal: Renewal, answer: RenewalAnswer, version: int) -> str:
    asked = (renewal.attempt_id, renewal.epoch, renewal.node, renewal.nonce)
    told = (answer.is_stale, answer.should_stop, float(answer.grace_s), answer.because)
    group: tuple[object, ...] = (answer.generation, answer.master_port)
    name = "shoal-renewal"
    if version >= KNOWS_GROUPS:
        name, group = f"shoal-renewal-{version}", (*group, answer.is_after_hang)
    if version >= NAMES_OTHERS:
        group = (*group, answer.control_urls)
    # Only where there is one: either side may be older than drills and sleep.
    drill = () if answer.drill is None else (_order(answer.drill, version),)
    sleep = () if answer.should_sleep is None else ({"should_sleep": answer.should_sleep},)
    text = msgspec.json.encode((name, *asked, *told, *group, *drill, *sleep))
    return hmac.new(key.encode(), text, hashlib.sha256).hexdigest()


def _order(drill: DrillOrder, version: int) -> dict[str, object]:
    order: dict[str, object] = msgspec.to_builtins(drill)
    if version < KNOWS_GROUPS:
        del order["generation"]
    return order
