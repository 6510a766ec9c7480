"""The files that HAProxy reads, in a folder of its own: kept whole, checked by HAProxy before they count."""

from __future__ import annotations

import subprocess
from pathlib import Path

from shoal.serving.feed import write_whole
from shoal.serving.haproxy.render import CALLERS, TLS, Place, Rendering, as_map

CONFIG = "haproxy.cfg"
CANDIDATE = "next.cfg"
SOCKET = "master.sock"
CHECK_S = 60.0


class Files:
    """`folder` is for these alone, and for nobody else to read: servers are named by secrets."""

    def __init__(self, program: str, folder: Path, place: Place, tls: tuple[Path, Path] | None) -> None:
        self.folder = folder
        self.place = place
        self._program = program
        self._tls = tls

    @property
    def command(self) -> list[str]:
        """In `folder`, what serves as kept. Quietly: it would tell of servers by their names."""
        return [self._program, "-W", "-q", "-S", f"unix@{SOCKET},mode,600", "-f", CONFIG]

    def keep(self, rendering: Rendering) -> None:
        """For the next start, or reload."""
        self._write_maps(rendering)
        self._write(CONFIG, rendering.config)
        for old in (*self.folder.glob("routes-*.map"), *self.folder.glob("papers-*")):
            if old.name not in rendering.routes and old.name not in rendering.papers:
                old.unlink()

    def check(self, rendering: Rendering, *, is_renewal: bool = False) -> None:
        """`ValueError`: HAProxy would not start with it; in a renewal, with the certificate as it is now."""
        before = (self.folder / TLS).read_bytes() if (self.folder / TLS).exists() else None
        self._write_maps(rendering)
        if self._tls is not None and (is_renewal or before is None):
            self._write(TLS, "\n".join(file.read_text() for file in self._tls))
        self._write(CANDIDATE, rendering.config)
        done = subprocess.run(
            [self._program, "-c", "-f", CANDIDATE],
            cwd=self.folder,
            pass_fds=(self.place.listener,),
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
        """Another one when the certificate has changed."""
        try:
            return tuple(file.stat().st_mtime_ns for file in self._tls or ())
        except OSError:
            return ()

    def _write_maps(self, rendering: Rendering) -> None:
        self._write(CALLERS, as_map(rendering.callers))
        for name, text in (*rendering.routes.items(), *rendering.papers.items()):
            self._write(name, text)

    def _write(self, name: str, text: str) -> None:
        write_whole(self.folder / name, text.encode())


def _without_secrets(told: str, rendering: Rendering) -> str:
    for servers in rendering.servers.values():
        for server in servers:
            if server.replica.secret:
                told = told.replace(server.replica.secret, server.replica.replica_id)
    return told.strip()[-1000:]
