"""Certificates that sign themselves."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

HERE = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])


def pair(name: str) -> tuple[bytes, bytes]:
    """A certificate for 127.0.0.1 in that name, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    told = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(told)
        .issuer_name(told)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(HERE, critical=False)
        .sign(key, hashes.SHA256())
    )
    kind, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    return made.public_bytes(pem), key.private_bytes(pem, kind, plain)


def write_pair(place: Path) -> tuple[Path, Path]:
    """Its files."""
    files = place / "cert.pem", place / "key.pem"
    for file, content in zip(files, pair("shoal.test"), strict=True):
        file.write_bytes(content)
        file.chmod(0o600)
    return files
