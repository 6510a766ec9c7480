"""What `shoal connect ray` wrote down about the cluster, and how its token must be kept."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

from shoal.engines.cluster_id import ClusterId
from shoal.engines.connection import Connection, load
from shoal.errors import SpecError

FILE = "ray.json"
TRIED = "2.60"
"""The version that Shoal's own tests use."""
TOKENS_SINCE = (2, 52)


class RayConfig(Connection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    address: str = ""
    """HOST:PORT of the head; empty: a Ray of our own, on this machine alone."""
    token_file: str = ""
    """With what everybody in this Ray proves that they belong to it; empty: that of our own Ray."""
    tls_cert: str = ""
    """By what this machine is known in a Ray whose processes speak TLS; empty: they do not."""
    tls_key: str = ""
    tls_ca: str = ""
    """Whose certificates that Ray believes."""
    ray_python: str = sys.executable
    """The Python with Ray in it on this machine: of exactly the cluster's versions."""

    @property
    def cluster_id(self) -> ClusterId:
        """By its head's address: Ray's own id is another one after each start of a head without a disk, and
        jobs on its nodes outlive that.
        """
        return ClusterId(engine="ray", heads=(self.address or "our own",))


def load_config(home: Path) -> RayConfig:
    """`SpecError` where nobody connected this home, or the file is broken."""
    return load(home / FILE, RayConfig, "Ray")


def check_files(config: RayConfig) -> None:
    """`SpecError` unless what proves that we belong to that Ray is there, and its secrets are ours alone."""
    check_token_file(Path(config.token_file))
    if config.tls_key:
        _check_private(Path(config.tls_key), "key file", "`--tls-key FILE`")
        for path in (config.tls_cert, config.tls_ca):
            _read(Path(path), "certificate file", "`--tls-cert FILE --tls-ca FILE`")


def check_token_file(path: Path) -> None:
    """`SpecError` unless it is there, holds something, and its owner alone can read it."""
    _check_private(path, "token file", f"copy the head's: `ray get-auth-token > {path}`")


def _check_private(path: Path, what: str, hint: str) -> None:
    if not _read(path, what, hint).strip():
        raise SpecError(f"the {what} {path} is empty", hint=hint)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise SpecError(
            f"the {what} {path} has mode {mode:04o}: others can read it, and rule the cluster with it",
            hint=f"chmod 600 {path}",
        )


def _read(path: Path, what: str, hint: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"the {what} {path} cannot be read: {getattr(error, 'strerror', None) or error}", hint=hint
        ) from error
