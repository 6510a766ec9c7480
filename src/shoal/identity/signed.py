"""Stateless tokens of jobs and supervisors: an attempt's id (and node) with a keyed MAC.

`shj_<attempt_id>_<mac>` speaks for the job, `shs_<attempt_id>.<node>_<digest>_<mac>` for one message of
its supervisor (see `shoal.proof`): a supervisor has a key and no token that could be used for another.
`shd_<mac>` is of the cluster's data planes. `sht_<attempt_id>_<mac>` is a ticket: whoever is to supervise a
share of that attempt on another machine fetches its order with it, once for each share.
The key is a file outside the database, so a copy of the database makes no token. Whether the attempt
still lives is not decided here: ask the store.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from enum import StrEnum

import msgspec

from shoal.proof import signature

MIN_KEY_BYTES = 32
_JOB = re.compile(r"shj_(?P<attempt>[a-z]{3}_[0-9a-z]{1,40})_(?P<mac>[0-9a-f]{64})", re.ASCII)
_SUPERVISOR = re.compile(
    r"shs_(?P<attempt>[a-z]{3}_[0-9a-z]{1,40})\.(?P<node>[A-Za-z0-9._-]{1,200})_(?P<digest>[0-9a-f]{64})_(?P<mac>[0-9a-f]{64})",
    re.ASCII,
)


_TICKET = re.compile(r"sht_(?P<attempt>[a-z]{3}_[0-9a-z]{1,40})_(?P<mac>[0-9a-f]{64})", re.ASCII)
_DATA_PLANE = re.compile(r"shd_(?P<mac>[0-9a-f]{64})", re.ASCII)


class SignedKind(StrEnum):
    JOB = "job"
    SUPERVISOR = "supervisor"
    DATA_PLANE = "data_plane"
    TICKET = "ticket"


class SignedToken(msgspec.Struct, frozen=True):
    """A token whose MAC was checked. A supervisor's has `node`, and the `digest` of its only body."""

    kind: SignedKind
    attempt_id: str
    node: str | None = None
    digest: str | None = None


def job_token(key: bytes, attempt_id: str) -> str:
    """What the ranks of this attempt carry. The same every time it is asked for."""
    return f"shj_{attempt_id}_{_mac(key, SignedKind.JOB, attempt_id, '')}"


def data_plane_token(key: bytes) -> str:
    """What every data plane of this cluster carries: it reads the table and reports, nothing else."""
    return f"shd_{_mac(key, SignedKind.DATA_PLANE, '', '')}"


def ticket(key: bytes, attempt_id: str) -> str:
    """The right to fetch the orders of this attempt. That each is given once is the desk's to see to."""
    return f"sht_{attempt_id}_{_mac(key, SignedKind.TICKET, attempt_id, '')}"


def proof_key(key: bytes, attempt_id: str, node: str) -> str:
    """What the supervisor of this attempt on this node and the control plane sign with. It is never sent."""
    return _mac(key, "proof", attempt_id, node)


def replica_secret(key: bytes, attempt_id: str) -> str:
    """What a data plane proves itself with to a replica that runs as this attempt."""
    return _mac(key, "replica", attempt_id, "")


def parse_signed(key: bytes, text: str) -> SignedToken | None:
    """The token if this key made it; None for any other text, however close."""
    if match := _JOB.fullmatch(text):
        expected = _mac(key, SignedKind.JOB, match["attempt"], "")
        token = SignedToken(SignedKind.JOB, match["attempt"])
    elif match := _SUPERVISOR.fullmatch(text):
        expected = signature(proof_key(key, match["attempt"], match["node"]), match["digest"])
        token = SignedToken(SignedKind.SUPERVISOR, match["attempt"], match["node"], match["digest"])
    elif match := _TICKET.fullmatch(text):
        expected = _mac(key, SignedKind.TICKET, match["attempt"], "")
        token = SignedToken(SignedKind.TICKET, match["attempt"])
    elif match := _DATA_PLANE.fullmatch(text):
        expected = _mac(key, SignedKind.DATA_PLANE, "", "")
        token = SignedToken(SignedKind.DATA_PLANE, "")
    else:
        return None
    return token if hmac.compare_digest(expected, match["mac"]) else None


def _mac(key: bytes, kind: str, attempt_id: str, node: str) -> str:
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"a signing key has at least {MIN_KEY_BYTES} bytes, this one {len(key)}")
    # The kind is signed too: a job's MAC never passes for a supervisor's.
    text = f"shoal-{kind}\0{attempt_id}\0{node}"
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
