"""Certificates that sign themselves.

A porch as a process of its own before a server of the test's, and those who come to it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from shoal.clock import SystemClock
from shoal.control.services.state import SidecarIdentities
from shoal.identity.authority import CertifiedKey, make_authority, make_server
from shoal.runtime.replica.sidecar_config import LISTENER_FD, SidecarConfig, memory_file
from shoal.runtime.replica.sidecar_process import Sidecar
from shoal.sidecar_tls import client_context, sidecar_name
from shoal.wire import TlsIdentity

LOOPBACK_NAME = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])


def self_signed_pair(name: str) -> tuple[bytes, bytes]:
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
        .add_extension(LOOPBACK_NAME, critical=False)
        .sign(key, hashes.SHA256())
    )
    kind, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    return made.public_bytes(pem), key.private_bytes(pem, kind, plain)


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Its files."""
    files = folder / "cert.pem", folder / "key.pem"
    for file, content in zip(files, self_signed_pair("shoal.test"), strict=True):
        file.write_bytes(content)
        file.chmod(0o600)
    return files


ATTEMPT, OTHER_ATTEMPT = "att_000one", "att_000two"
PATIENCE_S = 30.0


def identity_of(certified: CertifiedKey, authority: CertifiedKey) -> TlsIdentity:
    return TlsIdentity(
        certificate=certified.certificate.decode(),
        key=certified.key.decode(),
        authority=authority.certificate.decode(),
    )


class SidecarAuthority:
    """An authority, and what it certifies."""

    def __init__(self) -> None:
        self.authority = make_authority("a test's", time.time())
        self.identities = SidecarIdentities(self.authority, SystemClock())

    def control_plane_identity(self) -> TlsIdentity:
        """What a control plane shows to nodes."""
        return identity_of(make_server(self.authority, ["localhost"], time.time()), self.authority)

    def client_context(self) -> ssl.SSLContext:
        return client_context(self.identities.for_data_planes())


@contextlib.contextmanager
def running_sidecar(authority: SidecarAuthority, server: str, attempt_id: str = ATTEMPT) -> Iterator[str]:
    """Where it is, as data planes are told."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        port = listener.getsockname()[1]
        brief = SidecarConfig(
            tls_identity=authority.identities.for_sidecar(attempt_id),
            server=server,
            supervisor_pid=os.getpid(),
        )
        told = memory_file(brief)
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-P", "-m", "shoal.runtime.replica.sidecar"],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, told, 0),  # first: it may be the number that the next one takes
                (os.POSIX_SPAWN_DUP2, listener.fileno(), LISTENER_FD + 100),
                (os.POSIX_SPAWN_DUP2, LISTENER_FD + 100, LISTENER_FD),
            ],
        )
        os.close(told)
    try:
        yield f"tls:127.0.0.1:{port}"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class ThreadSidecars:
    """Porches in threads of this process, for replicas in this process."""

    def __init__(self, authority: SidecarAuthority) -> None:
        self.authority = authority
        self._num_started = 0
        self._is_over = False
        self._threads: list[threading.Thread] = []

    def start_before(self, server: str) -> tuple[str, str]:
        """Where a new one is, and what its certificate says."""
        self._num_started += 1
        attempt_id = f"att_{self._num_started}"
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        brief = SidecarConfig(
            tls_identity=self.authority.identities.for_sidecar(attempt_id), server=server, supervisor_pid=0
        )
        porch = Sidecar(listener, brief, SystemClock(), max_tunnels=1000)
        thread = threading.Thread(target=self._run, args=(porch, listener), daemon=True)
        thread.start()
        self._threads.append(thread)
        return f"tls:127.0.0.1:{listener.getsockname()[1]}", sidecar_name(attempt_id)

    def end(self) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()

    def _run(self, sidecar: Sidecar, listener: socket.socket) -> None:
        while not self._is_over:
            sidecar.poll(0.05)
        sidecar.close()
        listener.close()


def connect_tls(address: str, context: ssl.SSLContext, name: str) -> ssl.SSLSocket:
    """Blocking. Nothing was read yet."""
    host, _, port = address.removeprefix("tls:").rpartition(":")
    link = socket.create_connection((host, int(port)), PATIENCE_S)
    return context.wrap_socket(link, server_hostname=name, suppress_ragged_eofs=False)


def read_all(link: socket.socket) -> bytes:
    """What comes until the end."""
    told = b""
    with contextlib.suppress(ssl.SSLZeroReturnError):  # an end, where ours was told before
        while piece := link.recv(1 << 16):
            told += piece
    return told
