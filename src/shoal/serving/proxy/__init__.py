"""The way of a request through the data plane, from the caller's connection to the replica's and back.

`downstream.py` is a caller's connection. It cuts the bytes into requests with `request_head.py` and
`chunks.py`, asks `admission/routes.py` which service and caller a head means, and starts an `Exchange` for
each request.

`exchange.py` follows one request: it waits for a replica, sends the request, relays the reply, and retries
where that is safe. Each connection to a replica is an `Upstream` (`upstream.py`), which connects directly,
through a Unix socket or through a replica sidecar, and parses the reply with `reply.py`. `reply.py` also
rewrites replies for HTTP/1.0 and for event streams that begin before a replica is ready. `local_reply.py`
writes the data plane's own replies: refusals and health.
"""
