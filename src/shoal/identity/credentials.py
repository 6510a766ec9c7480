"""Tokens of users, jobs, supervisors and data planes, and the sealing of job secrets.

User tokens: `shl_<token_id>_<secret>`. The store keeps only a hash of the secret. The secret has 256 random
bits, so a plain SHA-256 is as hard to invert as any slow hash. The comparison takes constant time.

Signed tokens are stateless: an attempt's id (and node) with a keyed MAC.

- `shj_<attempt_id>_<mac>` speaks for a job.
- `shs_<attempt_id>.<node>_<digest>_<mac>` speaks for one message of a supervisor (see `shoal.proof`). A
  supervisor has a key, and no token that could be used for another message.
- `shd_<mac>` speaks for the cluster's data planes.
- `sht_<attempt_id>_<mac>` is a bootstrap token: a node agent on another machine uses it to fetch the spec of
  its task, once for each task.

The key is a file outside the database, so a copy of the database cannot make tokens. This module does not
know whether an attempt is still open. The store does.

Job secrets are sealed for the store with AES-256-GCM and bound to their job. A copy of the database without
the key file reveals no secret, and a sealed blob that was moved to another job cannot be opened.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable
from enum import StrEnum

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from shoal.errors import StateError
from shoal.model.people import Token
from shoal.proof import signature

PREFIX = "shl"
SECRET_BYTES = 32
_TEXT = re.compile(r"shl_(?P<id>tok_[0-9a-z]{1,40})_(?P<secret>[0-9a-f]{64})", re.ASCII)
_NOBODY = Token(token_id="", user_id="", secret_hash=bytes(32))


class MintedToken(msgspec.Struct, frozen=True):
    """A new token. The user sees `text` once, the store keeps `secret_hash`."""

    text: str
    secret_hash: bytes


class UserTokenText(msgspec.Struct, frozen=True):
    """The two halves of a token from a request. They are unverified."""

    token_id: str
    secret: str

    def matches(self, token: Token | None) -> bool:
        """Whether the secret is this token's. Takes the same time for a token that does not exist."""
        kept = token or _NOBODY
        is_same = hmac.compare_digest(hash_secret(self.token_id, self.secret), kept.secret_hash)
        return is_same and token is not None


def mint_token(token_id: str, random: Callable[[int], bytes]) -> MintedToken:
    """Make a secret for `token_id`. `random` must be a cryptographic source (`os.urandom`)."""
    secret = random(SECRET_BYTES).hex()
    return MintedToken(f"{PREFIX}_{token_id}_{secret}", hash_secret(token_id, secret))


def parse_user_token(text: str) -> UserTokenText | None:
    """Return the halves of a well-formed token, or None for any other text."""
    match = _TEXT.fullmatch(text)
    return UserTokenText(match["id"], match["secret"]) if match else None


def hash_secret(token_id: str, secret: str) -> bytes:
    """Return the hash for the store. It is bound to the id, so it is useless for another token."""
    return hashlib.sha256(f"shoal-token\0{token_id}\0{secret}".encode()).digest()


MIN_KEY_BYTES = 32
_JOB = re.compile(r"shj_(?P<attempt>[a-z]{3}_[0-9a-z]{1,40})_(?P<mac>[0-9a-f]{64})", re.ASCII)
_SUPERVISOR = re.compile(
    r"shs_(?P<attempt>[a-z]{3}_[0-9a-z]{1,40})\.(?P<node>[A-Za-z0-9._-]{1,200})_(?P<digest>[0-9a-f]{64})_(?P<mac>[0-9a-f]{64})",
    re.ASCII,
)


_BOOTSTRAP = re.compile(r"sht_(?P<attempt>[a-z]{3}_[0-9a-z]{1,40})_(?P<mac>[0-9a-f]{64})", re.ASCII)
_DATA_PLANE = re.compile(r"shd_(?P<mac>[0-9a-f]{64})", re.ASCII)


class SignedKind(StrEnum):
    JOB = "job"
    SUPERVISOR = "supervisor"
    DATA_PLANE = "data_plane"
    BOOTSTRAP = "bootstrap"


class SignedToken(msgspec.Struct, frozen=True):
    """A token with a verified MAC. A supervisor's has `node`, and the `digest` of its only body."""

    kind: SignedKind
    attempt_id: str
    node: str | None = None
    digest: str | None = None


def job_token(key: bytes, attempt_id: str) -> str:
    """Return the token of the ranks of this attempt. It is always the same."""
    return f"shj_{attempt_id}_{_mac(key, SignedKind.JOB, attempt_id, '')}"


def data_plane_token(key: bytes) -> str:
    """Return the token of every data plane of this cluster. It may only read the table and report."""
    return f"shd_{_mac(key, SignedKind.DATA_PLANE, '', '')}"


def bootstrap_token(key: bytes, attempt_id: str) -> str:
    """Return the token that may fetch the task specs of this attempt, each of them once."""
    return f"sht_{attempt_id}_{_mac(key, SignedKind.BOOTSTRAP, attempt_id, '')}"


def proof_key(key: bytes, attempt_id: str, node: str) -> str:
    """Return the key with which supervisor and control plane sign. It never travels over the network."""
    return _mac(key, "proof", attempt_id, node)


def replica_secret(key: bytes, attempt_id: str) -> str:
    """Return the secret with which a data plane authenticates to the replica of this attempt."""
    return _mac(key, "replica", attempt_id, "")


def parse_signed(key: bytes, text: str) -> SignedToken | None:
    """Return the token if this key made it, or None for any other text."""
    if match := _JOB.fullmatch(text):
        expected = _mac(key, SignedKind.JOB, match["attempt"], "")
        token = SignedToken(SignedKind.JOB, match["attempt"])
    elif match := _SUPERVISOR.fullmatch(text):
        expected = signature(proof_key(key, match["attempt"], match["node"]), match["digest"])
        token = SignedToken(SignedKind.SUPERVISOR, match["attempt"], match["node"], match["digest"])
    elif match := _BOOTSTRAP.fullmatch(text):
        expected = _mac(key, SignedKind.BOOTSTRAP, match["attempt"], "")
        token = SignedToken(SignedKind.BOOTSTRAP, match["attempt"])
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


VERSION = b"\x01"
NONCE_BYTES = 12


class SecretsUnreadable(StateError):
    """The secrets were sealed with another key, or the blob was changed."""

    code = "secrets.unreadable"


def seal_secrets(key: bytes, job_id: str, secrets: dict[str, str], random: Callable[[int], bytes]) -> bytes:
    """Encrypt the secrets for `open_secrets` with the same key and job id."""
    nonce = random(NONCE_BYTES)
    sealed = AESGCM(_derive(key)).encrypt(nonce, msgspec.json.encode(secrets), _bind(job_id))
    return VERSION + nonce + sealed


def open_secrets(key: bytes, job_id: str, sealed: bytes) -> dict[str, str]:
    """Decrypt the secrets. Raise `SecretsUnreadable`, which names the job and never the content."""
    nonce, body = sealed[1 : 1 + NONCE_BYTES], sealed[1 + NONCE_BYTES :]
    try:
        if sealed[:1] != VERSION:
            raise InvalidTag
        plain = AESGCM(_derive(key)).decrypt(nonce, body, _bind(job_id))
    except (InvalidTag, ValueError) as error:
        raise SecretsUnreadable(
            f"the secrets of {job_id} cannot be opened with this server's key",
            hint="put back the `keys/` directory that belongs to this database, or submit the job again",
        ) from error
    return msgspec.json.decode(plain, type=dict[str, str])


def _bind(job_id: str) -> bytes:
    return f"shoal-secrets\0{job_id}".encode()


def _derive(key: bytes) -> bytes:
    """Derive a key only for sealing, so that one key file serves signing and sealing."""
    return HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=b"shoal secrets").derive(key)
