"""A job's secrets, sealed for the store: AES-256-GCM, bound to the job they were given for.

A copy of the database without the key file holds no secret, and a sealed blob moved to another job
does not open.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from shoal.errors import StateError

VERSION = b"\x01"
NONCE_BYTES = 12


class SecretsUnreadable(StateError):
    """The key is not the one they were sealed with, or the blob was changed."""

    code = "secrets.unreadable"


def seal_secrets(key: bytes, job_id: str, secrets: dict[str, str], random: Callable[[int], bytes]) -> bytes:
    """The secrets as bytes that only `open_secrets` with the same key and job id can read."""
    nonce = random(NONCE_BYTES)
    sealed = AESGCM(_derive(key)).encrypt(nonce, msgspec.json.encode(secrets), _bind(job_id))
    return VERSION + nonce + sealed


def open_secrets(key: bytes, job_id: str, sealed: bytes) -> dict[str, str]:
    """What was sealed. Raises `SecretsUnreadable`, naming the job and never the content."""
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
    """A key for this use alone, so that one key file serves signing and sealing."""
    return HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=b"shoal secrets").derive(key)
