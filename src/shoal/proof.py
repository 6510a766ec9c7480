"""Sign a supervisor's renewals, and prove that a reply to one comes from the control plane.

This is not part of `wire` because it needs OpenSSL, and a supervisor starts its ranks before it loads that.
The key travels to the supervisor on its pipe and never over the network, so an eavesdropper on the port does
not learn it. An eavesdropper can only repeat a signed renewal, which changes nothing.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from shoal.wire import DrillCommand, Renewal, RenewalReply

VERSION = 3
"""Version 1 does not cover a drill's round and `is_after_hang`, version 2 does not cover `control_urls`, and
version 3 covers the whole reply."""
COVERS_ROUNDS, COVERS_CONTROL_URLS = 2, 3


def sign(key: str, renewal: Renewal, body: bytes) -> str:
    """Return the token for exactly this body. It may be used again, but with no other body."""
    return sign_for(key, renewal.attempt_id, renewal.node, body)


def sign_for(key: str, attempt_id: str, node: str, body: bytes) -> str:
    """Return the token for any message body of this attempt's task on this node."""
    digest = hashlib.sha256(body).hexdigest()
    return f"shs_{attempt_id}.{node}_{digest}_{signature(key, digest)}"


def signature(key: str, digest: str) -> str:
    """Sign a body's digest. The key belongs to one attempt on one node, so the text need not name them."""
    return hmac.new(key.encode(), f"shoal-asked\0{digest}".encode(), hashlib.sha256).hexdigest()


def prove(key: str, renewal: Renewal, reply: RenewalReply) -> RenewalReply:
    """Return the reply with a proof that holds only for this renewal, because of its nonce.

    The proof has the newest version that the supervisor knows. An older supervisor would reject a newer
    proof, and gets no field that its version does not cover.
    """
    version = min(renewal.proof_version, VERSION)
    if version < COVERS_CONTROL_URLS:
        reply = msgspec.structs.replace(reply, control_urls=())
    return msgspec.structs.replace(reply, proof=_mac(key, renewal, reply, version))


def is_proven(key: str, renewal: Renewal, reply: RenewalReply) -> bool:
    """Whether a holder of `key` gave exactly this reply to exactly this renewal.

    An older control plane proves fewer fields and sends only those. An attacker cannot ask for an older proof
    in a newer supervisor's name, because the renewal is signed.
    """
    if not key or not renewal.nonce:
        return False
    versions = range(_least_version(reply), VERSION + 1)
    macs = [_mac(key, renewal, reply, version) for version in versions]
    return any(hmac.compare_digest(mac.encode(), reply.proof.encode()) for mac in macs)


def _least_version(reply: RenewalReply) -> int:
    """Return the first version that covers every field of the reply."""
    if reply.control_urls:
        return COVERS_CONTROL_URLS
    says_no_more = not reply.is_after_hang and (reply.drill is None or reply.drill.rendezvous_round is None)
    return 1 if says_no_more else COVERS_ROUNDS


def _mac(key: str, renewal: Renewal, reply: RenewalReply, version: int) -> str:
    question = (renewal.attempt_id, renewal.epoch, renewal.node, renewal.nonce)
    answer = (reply.is_stale, reply.should_stop, float(reply.grace_s), reply.because)
    group: tuple[object, ...] = (reply.rendezvous_round, reply.master_port)
    name = "shoal-renewal"
    if version >= COVERS_ROUNDS:
        name, group = f"shoal-renewal-{version}", (*group, reply.is_after_hang)
    if version >= COVERS_CONTROL_URLS:
        group = (*group, reply.control_urls)
    # Included only if present, because either side may be older than drills and sleep.
    drill = () if reply.drill is None else (_drill_fields(reply.drill, version),)
    sleep = () if reply.should_sleep is None else ({"should_sleep": reply.should_sleep},)
    text = msgspec.json.encode((name, *question, *answer, *group, *drill, *sleep))
    return hmac.new(key.encode(), text, hashlib.sha256).hexdigest()


def _drill_fields(drill: DrillCommand, version: int) -> dict[str, object]:
    fields: dict[str, object] = msgspec.to_builtins(drill)
    if version < COVERS_ROUNDS:
        del fields["rendezvous_round"]
    return fields
