"""Certificates are renewed under a running data plane, and never half."""

from __future__ import annotations

import datetime as dt
import itertools
import os
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shoal.serving.tls import TlsFiles


def pair(name: str) -> tuple[bytes, bytes]:
    """A certificate in that name, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    told = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(told)
        .issuer_name(told)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    kind, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    return made.public_bytes(pem), key.private_bytes(pem, kind, plain)


def shown(server: ssl.SSLContext) -> bytes:
    """The certificate that a caller sees, in a handshake without a network."""
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trust.check_hostname = False
    trust.verify_mode = ssl.CERT_NONE
    to_server, to_caller = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = trust.wrap_bio(to_caller, to_server)
    plane = server.wrap_bio(to_server, to_caller, server_side=True)
    waiting = [caller, plane]
    while waiting:
        for end in list(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:
                continue
    seen = caller.getpeercert(binary_form=True)
    assert seen is not None
    return ssl.DER_cert_to_PEM_cert(seen).encode()


CLOCK = itertools.count(1_000_000_000)


def write(path: Path, data: bytes) -> None:
    """Each later than the one before: a file system's clock may stand still for a while."""
    path.write_bytes(data)
    at = next(CLOCK)
    os.utime(path, (at, at))


def test_certificate_whose_key_is_not_there_yet_is_not_taken_and_the_one_before_works(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    old, new = pair("old"), pair("new")
    write(cert, old[0])
    write(key, old[1])
    files = TlsFiles(cert, key)
    assert shown(files.context) == old[0]
    write(cert, new[0])  # as somebody does who renews them one after the other
    files.refresh()
    assert shown(files.context) == old[0]
    write(key, new[1])
    files.refresh()
    assert shown(files.context) == new[0]
