"""Certificates are renewed under a running data plane, and never half."""

from __future__ import annotations

import itertools
import os
import ssl
from pathlib import Path

from shoal.serving.plane import TlsFiles
from tests.support.serving.sidecars import self_signed_pair


def shown(server: ssl.SSLContext) -> bytes:
    """Return the certificate that a caller sees, by a handshake without a network."""
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
    """Write a file with a later time stamp each time, because a file system's clock may stand still."""
    path.write_bytes(data)
    at = next(CLOCK)
    os.utime(path, (at, at))


def test_certificate_without_its_new_key_is_not_used_and_the_previous_one_still_works(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    old, new = self_signed_pair("old"), self_signed_pair("new")
    write(cert, old[0])
    write(key, old[1])
    files = TlsFiles(cert, key)
    assert shown(files.context) == old[0]
    write(cert, new[0])  # as a tool does that renews the two files one after the other
    files.refresh()
    assert shown(files.context) == old[0]
    write(key, new[1])
    files.refresh()
    assert shown(files.context) == new[0]
