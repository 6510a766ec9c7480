"""HTTP in: one guard that denies by default, routes by noun, plain views out.

A request passes these files in order:

http/server, connections, protocol   sockets, limits of each peer, bounded parsing
http/guard, authenticate             host, token, caller; everything else is refused here
routing -> call                      the route's permission, and the request as routes see it
requests, queries, http/bodies       bodies and query strings, decoded strictly, after permission
routes/                              one file for each noun; they call `control` and decide nothing
views/ -> http/problems, http/sse    model objects as JSON, errors as problem documents, streams

The API decides nothing that outlives a request: `identity` decides permissions, `control` makes the changes.
"""

from shoal.api.app import create_app
from shoal.api.http.server import check_listen, open_socket, serve, url_of

__all__ = ["check_listen", "create_app", "open_socket", "serve", "url_of"]
