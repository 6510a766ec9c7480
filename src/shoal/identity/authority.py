"""The cluster's own certificate authority: what supervisors on other machines trust, and nothing else does.

Pure: bytes in, bytes out. An authority signs control planes for the names they are reached by, the porches of
replicas for what they stand before, and data planes as the only clients of those.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Iterable

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS = 3650
SERVER_DAYS = 397
RENEW_DAYS = 60
"""A server's certificate with fewer days left is made anew: at the next start, and looked for once a day."""
SKEW = dt.timedelta(hours=1)
"""Clocks of nodes may be behind."""


class Pair(msgspec.Struct, frozen=True):
    """A certificate and its key, PEM."""

    certificate: bytes
    key: bytes


def make_authority(name: str, now: float) -> Pair:
    """A new authority, good for ten years; it can sign servers and no further authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _begun(subject, subject, key.public_key(), now, AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(is_authority=True), critical=True)
    builder = builder.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
    )
    return Pair(_pem(builder.sign(key, hashes.SHA256())), _key_pem(key))


def make_server(authority: Pair, names: Iterable[str], now: float) -> Pair:
    """A certificate of a server that is reached by `names`: host names and addresses."""
    return _issue(authority, "shoal control plane", names, ExtendedKeyUsageOID.SERVER_AUTH, now, SERVER_DAYS)


def make_porch(authority: Pair, name: str, now: float) -> Pair:
    """A certificate of the porch before one replica, good for as long as any replica runs: its key is in the
    memory of one process, and is never made anew there.
    """
    return _issue(authority, "shoal porch", (name,), ExtendedKeyUsageOID.SERVER_AUTH, now, AUTHORITY_DAYS)


def make_client(authority: Pair, name: str, now: float) -> Pair:
    """A certificate of who may come to porches; it serves nobody."""
    return _issue(authority, "shoal data plane", (name,), ExtendedKeyUsageOID.CLIENT_AUTH, now, SERVER_DAYS)


def _issue(
    authority: Pair, title: str, names: Iterable[str], use: x509.ObjectIdentifier, now: float, days: int
) -> Pair:
    signer = serialization.load_pem_private_key(authority.key, password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, title)])
    builder = _begun(subject, issuer.subject, key.public_key(), now, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(is_authority=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([use]), critical=False)
    builder = builder.add_extension(
        x509.SubjectAlternativeName([_general(n) for n in sorted(set(names))]), critical=False
    )
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
    )
    return Pair(_pem(builder.sign(signer, hashes.SHA256())), _key_pem(key))


def serves(server: Pair, authority: Pair, names: Iterable[str], now: float) -> bool:
    """Whether this certificate is the authority's and its key's, for all of `names`, and good for a while
    yet.
    """
    try:
        certificate = x509.load_pem_x509_certificate(server.certificate)
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.certificate))
        key = serialization.load_pem_private_key(server.key, password=None)
        said = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except Exception:  # noqa: BLE001 - whatever is wrong with it, it does not serve
        return False
    if certificate.public_key() != key.public_key():
        return False  # whoever made both was killed in between
    until = valid_until(server.certificate) - RENEW_DAYS * 86400
    return until > now and {_general(n) for n in names} <= set(said)


def valid_until(certificate: bytes) -> float:
    """When it ends, in seconds since 1970. `ValueError`: it is none."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc.timestamp()


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: float, days: int
) -> x509.CertificateBuilder:
    began = dt.datetime.fromtimestamp(now, tz=dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(began - SKEW)
        .not_valid_after(began + dt.timedelta(days=days))
    )


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
