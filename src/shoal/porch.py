"""What the two ends of a porch agree on: how each proves itself over TLS, and the first byte that is said.

A leaf. A porch stands on a node of another machine, before the server of a replica; data planes come to it.
Both have a certificate of the cluster's own authority: the porch's says whose replica it is, the data plane's
that it is one. Nobody else is let in, and no data plane speaks to anybody else.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator

from shoal.wire import Papers

SCHEME = "tls:"
"""Of an address that a porch is at: `tls:10.0.0.7:19000`."""
DATA_PLANE = "data-plane.shoal.internal"
GREETS = "shoal-porch/1"
"""Asked for by ALPN: the porch says `OPEN` once it has reached the server. Who does not ask hears the server
alone, and takes a server that is not there for one that hung up."""
OPEN = b"\n"


def name_of(attempt_id: str) -> str:
    """What the certificate says of the porch before a replica that runs as this attempt."""
    return f"{attempt_id.replace('_', '-')}.replica.shoal.internal"


def guard(papers: Papers) -> ssl.SSLContext:
    """For a porch. Who comes must be certified for clients: nobody but data planes is (`is_data_plane`)."""
    context = _with(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), papers)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # connections are kept; nothing is gained by beginning one again
    context.set_alpn_protocols([GREETS])
    return context


def visitor(papers: Papers) -> ssl.SSLContext:
    """For a data plane. `server_hostname` must be the name of the replica that it means."""
    context = _with(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), papers)
    context.set_alpn_protocols([GREETS])
    return context


def is_data_plane(link: ssl.SSLSocket) -> bool:
    """Whether who came is certified to be one. The authority was looked at by the handshake."""
    told = link.getpeercert() or {}
    return ("DNS", DATA_PLANE) in told.get("subjectAltName", ())


def _with(context: ssl.SSLContext, papers: Papers) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # An end without its last word may be somebody's who sits in between: it is none.
    context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF
    context.load_verify_locations(cadata=papers.authority)
    with _in_memory(papers.certificate + papers.key) as path:
        context.load_cert_chain(path)
    return context


@contextlib.contextmanager
def _in_memory(text: str) -> Iterator[str]:
    """OpenSSL reads a key from a file alone; this one is on no disk."""
    fd = os.memfd_create("papers", os.MFD_CLOEXEC)
    try:
        os.write(fd, text.encode("ascii"))
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
