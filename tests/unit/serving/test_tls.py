"""Certificates are renewed under a running data plane, and never half."""

from __future__ import annotations

import itertools
import os
import ssl
from pathlib import Path

from shoal.serving.tls import TlsFiles
from tests.support.certificates import pair


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
