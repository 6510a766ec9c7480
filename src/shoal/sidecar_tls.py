"""The TLS contexts of a replica sidecar and of the data planes that connect to it, and their first byte.

A sidecar runs on another machine in front of the server of a replica. The sidecar and the data plane each
have a certificate of the cluster's own authority. The sidecar's names its replica, the data plane's says that
it is a data plane. A sidecar accepts no other client, and a data plane connects to no other server.

This module imports only `wire`.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator

from shoal.wire import TlsIdentity

SCHEME = "tls:"
"""The scheme of a sidecar's address: `tls:10.0.0.7:19000`."""
DATA_PLANE = "data-plane.shoal.internal"
ALPN = "shoal-sidecar/1"
"""A client that requests this protocol by ALPN gets `READY_BYTE` once the sidecar has reached the server. Any
other client gets only the server's bytes, and cannot tell a missing server from one that hung up."""
READY_BYTE = b"\n"


def sidecar_name(attempt_id: str) -> str:
    """Return the name in the certificate of the sidecar of this attempt's replica."""
    return f"{attempt_id.replace('_', '-')}.replica.shoal.internal"


def sidecar_context(identity: TlsIdentity) -> ssl.SSLContext:
    """Return a sidecar's context. It requires a client certificate, which only data planes have."""
    context = _configure(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), identity)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # connections stay open, so session resumption gains nothing
    context.set_alpn_protocols([ALPN])
    return context


def client_context(identity: TlsIdentity) -> ssl.SSLContext:
    """Return a data plane's context. `server_hostname` must be the sidecar's name (`sidecar_name`)."""
    context = _configure(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), identity)
    context.set_alpn_protocols([ALPN])
    return context


def is_data_plane(link: ssl.SSLSocket) -> bool:
    """Whether the client's certificate is a data plane's. The handshake has verified the authority."""
    certificate = link.getpeercert() or {}
    return ("DNS", DATA_PLANE) in certificate.get("subjectAltName", ())


def _configure(context: ssl.SSLContext, identity: TlsIdentity) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # A connection that ends without a TLS close may have been cut by an attacker: treat it as an error.
    context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF
    context.load_verify_locations(cadata=identity.authority)
    with _in_memory(identity.certificate + identity.key) as path:
        context.load_cert_chain(path)
    return context


@contextlib.contextmanager
def _in_memory(text: str) -> Iterator[str]:
    """Put the text into a memory file, because OpenSSL reads a key only from a file. It is never on disk."""
    fd = os.memfd_create("papers", os.MFD_CLOEXEC)
    try:
        os.write(fd, text.encode("ascii"))
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
