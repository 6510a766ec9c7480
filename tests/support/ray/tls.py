"""Certificates for a laboratory's Ray: an authority, and what all its processes show to each other."""

from __future__ import annotations

import datetime as dt
import ipaddress
import time
from collections.abc import Collection
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shoal.engines.ray.config import RayConfig
from shoal.engines.ray.render import tls_environment
from shoal.identity.authority import make_authority


class RayTls:
    def __init__(self, folder: Path) -> None:
        self.cert, self.key, self.ca = (folder / name for name in ("cert.pem", "key.pem", "ca.pem"))

    def make(self, names: Collection[str]) -> None:
        """One certificate for these addresses, by an authority of its own."""
        authority = make_authority("a Ray of the tests", time.time())
        signer = serialization.load_pem_private_key(authority.key, password=None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        issuer = x509.load_pem_x509_certificate(authority.certificate)
        key, now = ec.generate_private_key(ec.SECP256R1()), dt.datetime.now(tz=dt.UTC)
        created = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ray")]))
            .issuer_name(issuer.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(
                x509.SubjectAlternativeName([_general_name(n) for n in sorted(names)]), critical=False
            )
            .sign(signer, hashes.SHA256())
        )
        self.cert.parent.mkdir(mode=0o700, parents=True)
        self.ca.write_bytes(authority.certificate)
        self.cert.write_bytes(created.public_bytes(serialization.Encoding.PEM))
        private = serialization.PrivateFormat.PKCS8
        plain = serialization.NoEncryption()
        self.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, private, plain))
        self.key.chmod(0o600)

    def connect_options(self) -> tuple[str, ...]:
        """For `shoal connect ray`."""
        return ("--tls-cert", str(self.cert), "--tls-key", str(self.key), "--tls-ca", str(self.ca))

    def environment(self) -> dict[str, str]:
        config = RayConfig(tls_cert=str(self.cert), tls_key=str(self.key), tls_ca=str(self.ca))
        return tls_environment(config)


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
