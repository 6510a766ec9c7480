"""The cluster's own certificate authority, which only Shoal's processes on other machines trust.

Pure: bytes in, bytes out. The authority signs control planes for their host names and addresses, sidecars for
the name of their replica, and data planes as the only clients of sidecars.
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
"""A server's certificate with fewer days left is replaced. The check runs at each start and once a day."""
SKEW = dt.timedelta(hours=1)
"""Clocks of nodes may be behind."""


class CertifiedKey(msgspec.Struct, frozen=True):
    """A certificate and its key, PEM."""

    certificate: bytes
    key: bytes


def make_authority(name: str, now: float) -> CertifiedKey:
    """Make an authority that is valid for ten years. It cannot sign another authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _certificate_builder(subject, subject, key.public_key(), now, AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(is_authority=True), critical=True)
    builder = builder.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
    )
    return CertifiedKey(_pem(builder.sign(key, hashes.SHA256())), _key_pem(key))


def make_server(authority: CertifiedKey, names: Iterable[str], now: float) -> CertifiedKey:
    """Make the certificate of a server with these host names and addresses."""
    return _issue(authority, "shoal control plane", names, ExtendedKeyUsageOID.SERVER_AUTH, now, SERVER_DAYS)


def make_sidecar(authority: CertifiedKey, name: str, now: float) -> CertifiedKey:
    """Make the certificate of one replica's sidecar. It is valid for longer than any replica runs, because
    the key is in the memory of one process and is never replaced there.
    """
    return _issue(authority, "shoal sidecar", (name,), ExtendedKeyUsageOID.SERVER_AUTH, now, AUTHORITY_DAYS)


def make_client(authority: CertifiedKey, name: str, now: float) -> CertifiedKey:
    """Make the certificate of a client of sidecars. It is not valid for a server."""
    return _issue(authority, "shoal data plane", (name,), ExtendedKeyUsageOID.CLIENT_AUTH, now, SERVER_DAYS)


def _issue(
    authority: CertifiedKey,
    title: str,
    names: Iterable[str],
    use: x509.ObjectIdentifier,
    now: float,
    days: int,
) -> CertifiedKey:
    signer = serialization.load_pem_private_key(authority.key, password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, title)])
    builder = _certificate_builder(subject, issuer.subject, key.public_key(), now, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(is_authority=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([use]), critical=False)
    builder = builder.add_extension(
        x509.SubjectAlternativeName([_general(n) for n in sorted(set(names))]), critical=False
    )
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
    )
    return CertifiedKey(_pem(builder.sign(signer, hashes.SHA256())), _key_pem(key))


def is_valid_server(server: CertifiedKey, authority: CertifiedKey, names: Iterable[str], now: float) -> bool:
    """Whether this authority made the certificate, it fits its key, has all `names`, and is fresh."""
    try:
        certificate = x509.load_pem_x509_certificate(server.certificate)
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.certificate))
        key = serialization.load_pem_private_key(server.key, password=None)
        alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except Exception:  # noqa: BLE001 - whatever is wrong with it, it does not serve
        return False
    if certificate.public_key() != key.public_key():
        return False  # the process that wrote both was killed in between
    until = valid_until(server.certificate) - RENEW_DAYS * 86400
    return until > now and {_general(n) for n in names} <= set(alternatives)


def valid_until(certificate: bytes) -> float:
    """Return when the certificate expires, in seconds since 1970. `ValueError`: it is no certificate."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc.timestamp()


def _certificate_builder(
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
