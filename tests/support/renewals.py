"""A control plane that does nothing but take renewals."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from shoal.proof import prove
from shoal.wire import Credentials, Renewal, RenewalAnswer

TOKEN = Credentials(proof_key="known to both")


def proven(body: dict[str, Any], **answer: Any) -> tuple[int, dict[str, Any]]:
    """What the true control plane answers to this renewal."""
    told = prove(TOKEN.proof_key, msgspec.convert(body, Renewal), RenewalAnswer(**answer))
    return 200, msgspec.to_builtins(told)


class ControlPlane:
    """Answers renewals as `answer` says and remembers them."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.answer: Callable[[dict[str, Any]], tuple[int, dict[str, Any]]] = proven
        plane = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                plane.seen.append({**body, "path": self.path})
                plane.tokens.append(self.headers["Authorization"])
                status, answer = plane.answer(body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def phases(self) -> list[str]:
        return [renewal["phase"] for renewal in self.seen]

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
