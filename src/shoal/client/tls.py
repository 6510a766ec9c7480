"""TLS for a connection. Loaded only for `https:` addresses: `ssl` costs every command 10 ms."""

from __future__ import annotations

import socket
import ssl


def wrap(link: socket.socket, host: str, ca_file: str | None) -> socket.socket:
    """Return the link over TLS to a server proven to be `host`. `ssl.SSLError` (an `OSError`) if
    it is not.
    """
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    if ca_file:
        context.load_verify_locations(ca_file)
    return context.wrap_socket(link, server_hostname=host)
