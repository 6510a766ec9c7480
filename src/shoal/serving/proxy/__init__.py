"""The connections of callers and of replicas, and the bytes on them.

`downstream.py` is a caller's connection. It cuts the bytes into requests with `request_head.py`, `chunks.py`
and `body_reader.py`, keeps what came ahead in `read_buffer.py`, asks `admission/routes.py` which service and
caller a head means, and starts an `Exchange` (`serving/exchange`) for each request. `caller_flow.py` is its
back-pressure, and `half_closed.py` finds out whether a caller that sends no more is still there.
`connection_plane.py` says what a connection needs of its data plane.

`upstream.py` is a connection to a replica. It connects directly, through a Unix socket or through a replica
sidecar, and parses the reply with `reply.py`, which also rewrites replies for HTTP/1.0 and for event streams
that begin before a replica is ready. `local_reply.py` writes the data plane's own replies.
"""
