"""HTTP in: routes, wire models and problem documents, behind one guard that says no by default.

Nothing is decided here that outlives a request: `identity` says who may, `control` does.
"""

from shoal.api.app import create_app
from shoal.api.server import check_listen, open_socket, serve, url_of

__all__ = ["check_listen", "create_app", "open_socket", "serve", "url_of"]
