"""The files that HAProxy reads, in a folder of their own. They are written whole and checked by HAProxy
first.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from shoal.serving.feed import write_whole
from shoal.serving.haproxy.render import CALLERS, TLS, HaproxyConfig, HaproxySettings, as_map

CONFIG = "haproxy.cfg"
CANDIDATE = "next.cfg"
SOCKET = "master.sock"
CHECK_S = 60.0


class HaproxyFiles:
    """`folder` holds only these files. Only this user may read it, because secrets name the servers."""

    def __init__(
        self, program: str, folder: Path, settings: HaproxySettings, tls: tuple[Path, Path] | None
    ) -> None:
        self.folder = folder
        self.settings = settings
        self._program = program
        self._tls = tls

    @property
    def command(self) -> list[str]:
        """The command to run in `folder`. Quiet, because HAProxy would log servers by their secret names."""
        return [self._program, "-W", "-q", "-S", f"unix@{SOCKET},mode,600", "-f", CONFIG]

    def write(self, rendering: HaproxyConfig) -> None:
        """Write the files for the next start or reload."""
        self._write_maps(rendering)
        self._write(CONFIG, rendering.config)
        for old in (*self.folder.glob("routes-*.map"), *self.folder.glob("papers-*")):
            if old.name not in rendering.routes and old.name not in rendering.tls_files:
                old.unlink()

    def check(self, rendering: HaproxyConfig, *, is_renewal: bool = False) -> None:
        """Have HAProxy check the configuration; in a renewal, with the certificate as it is now.

        `ValueError`: HAProxy would not start with it.
        """
        before = (self.folder / TLS).read_bytes() if (self.folder / TLS).exists() else None
        self._write_maps(rendering)
        if self._tls is not None and (is_renewal or before is None):
            self._write(TLS, "\n".join(file.read_text() for file in self._tls))
        self._write(CANDIDATE, rendering.config)
        done = subprocess.run(
            [self._program, "-c", "-f", CANDIDATE],
            cwd=self.folder,
            pass_fds=(self.settings.listener,),
            capture_output=True,
            text=True,
            check=False,
            timeout=CHECK_S,
        )
        if done.returncode:
            if before is not None:
                write_whole(self.folder / TLS, before)
            raise ValueError(f"HAProxy refuses its configuration: {_without_secrets(done.stderr, rendering)}")

    def stamp(self) -> tuple[int, ...]:
        """A value that differs when the certificate has changed."""
        try:
            return tuple(file.stat().st_mtime_ns for file in self._tls or ())
        except OSError:
            return ()

    def _write_maps(self, rendering: HaproxyConfig) -> None:
        self._write(CALLERS, as_map(rendering.callers))
        for name, text in (*rendering.routes.items(), *rendering.tls_files.items()):
            self._write(name, text)

    def _write(self, name: str, text: str) -> None:
        write_whole(self.folder / name, text.encode())


def _without_secrets(text: str, rendering: HaproxyConfig) -> str:
    for servers in rendering.servers.values():
        for server in servers:
            if server.replica.secret:
                text = text.replace(server.replica.secret, server.replica.replica_id)
    return text.strip()[-1000:]
