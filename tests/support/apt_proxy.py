"""An HTTP proxy for the apt of machines that reach nobody but their bridge: it asks in their place."""

from __future__ import annotations

import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Proxy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        wanted = {
            name: value for name, value in self.headers.items() if name.lower() in {"range", "if-range"}
        }
        try:
            answer = urllib.request.urlopen(urllib.request.Request(self.path, headers=wanted), timeout=60)
        except urllib.error.HTTPError as refusal:
            self.send_error(refusal.code)
            return
        with answer:
            self.send_response(answer.status)
            for name in ("Content-Length", "Content-Type", "Content-Range", "Last-Modified"):
                if value := answer.headers.get(name):
                    self.send_header(name, value)
            self.end_headers()
            shutil.copyfileobj(answer, self.wfile)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def apt_proxy(address: str) -> Iterator[str]:
    """The proxy's URL, at this address of ours."""
    with ThreadingHTTPServer((address, 0), _Proxy) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://{address}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
