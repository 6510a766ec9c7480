"""The files of the cluster's certificate authority in a home: made on first use, for their owner alone."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit

from shoal.clock import Clock
from shoal.control.first import write_private
from shoal.identity.authority import Pair, make_authority, make_server, serves
from shoal.settings import Settings

ALWAYS = ("localhost", "127.0.0.1")


def load_authority(home: Path, clock: Clock) -> Pair:
    """The home's authority. Control planes of one cluster share it, in the directory that they share."""
    certificate, key = _files_of(home)
    if not certificate.exists():
        made = make_authority("shoal cluster", clock.now())
        write_private(key, made.key)
        write_private(certificate, made.certificate)
    return Pair(certificate.read_bytes(), key.read_bytes())


def load_certificate(settings: Settings, clock: Clock) -> tuple[Path, Path]:
    """The files of a certificate by which supervisors know this control plane; made anew where it is old or
    the addresses changed. Blocks, and may be repeated. `OSError`: the authority is not there, or the disk
    does not take it: never another authority, which no running supervisor would know.
    """
    authority = Pair(*(path.read_bytes() for path in _files_of(settings.state_dir)))
    keys = settings.home / "keys"  # its own: another control plane has other addresses
    certificate, key = keys / "nodes.pem", keys / "nodes.key"
    names = {*ALWAYS, socket.gethostname(), settings.nodes_host, *hosts_of(settings.reach)}
    if certificate.exists() and key.exists():
        known = Pair(certificate.read_bytes(), key.read_bytes())
        if serves(known, authority, names, clock.now()):
            return certificate, key
    made = make_server(authority, names, clock.now())
    write_private(key, made.key)
    write_private(certificate, made.certificate)
    return certificate, key


def _files_of(home: Path) -> tuple[Path, Path]:
    return home / "keys" / "ca.pem", home / "keys" / "ca.key"


def hosts_of(urls: tuple[str, ...]) -> set[str]:
    return {host for url in urls if (host := urlsplit(url).hostname)}
