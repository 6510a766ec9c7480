"""The configuration that `shoal connect ray` wrote, and checks of its token and certificate files."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

from shoal.engines.home_records import ClusterId
from shoal.engines.remote.connection import ClusterConnection, load_connection
from shoal.errors import SpecError

FILE = "ray.json"
TRIED = "2.60"
"""The version that Shoal's own tests use."""
TOKENS_SINCE = (2, 52)


class RayConfig(ClusterConnection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    address: str = ""
    """HOST:PORT of the head; empty: Shoal's own Ray, on this machine alone."""
    token_file: str = ""
    """The token of this Ray; empty: that of our own Ray."""
    tls_cert: str = ""
    """The certificate of this machine in a Ray that uses TLS; empty: the Ray does not."""
    tls_key: str = ""
    tls_ca: str = ""
    """The authority whose certificates that Ray trusts."""
    ray_python: str = sys.executable
    """The Python with Ray on this machine, of exactly the cluster's versions."""

    @property
    def cluster_id(self) -> ClusterId:
        """Identify the cluster by its head's address.

        Ray's own id changes with each start of a head without a disk, and jobs on its nodes outlive that.
        """
        return ClusterId(engine="ray", heads=(self.address or "our own",))


def load_config(home: Path) -> RayConfig:
    """Load the configuration. `SpecError`: this home is not connected, or the file is broken."""
    return load_connection(home / FILE, RayConfig, "Ray")


def check_files(config: RayConfig) -> None:
    """Raise `SpecError` unless the token and certificates exist and only this user can read the secrets."""
    check_token_file(Path(config.token_file))
    if config.tls_key:
        _check_private(Path(config.tls_key), "key file", "`--tls-key FILE`")
        for path in (config.tls_cert, config.tls_ca):
            _read(Path(path), "certificate file", "`--tls-cert FILE --tls-ca FILE`")


def check_token_file(path: Path) -> None:
    """Raise `SpecError` unless the file exists, is not empty, and only its owner can read it."""
    _check_private(path, "token file", f"copy the head's: `ray get-auth-token > {path}`")


def _check_private(path: Path, file_kind: str, hint: str) -> None:
    if not _read(path, file_kind, hint).strip():
        raise SpecError(f"the {file_kind} {path} is empty", hint=hint)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise SpecError(
            f"the {file_kind} {path} has mode {mode:04o}: others can read it, and rule the cluster with it",
            hint=f"chmod 600 {path}",
        )


def _read(path: Path, file_kind: str, hint: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"the {file_kind} {path} cannot be read: {getattr(error, 'strerror', None) or error}", hint=hint
        ) from error
