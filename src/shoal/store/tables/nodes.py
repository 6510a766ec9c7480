"""Nodes: one whole record each, replaced under guard of its version.

Maintenance windows and reservations: one whole record each, removed once they are cancelled or long over.
"""

from __future__ import annotations

from functools import lru_cache

from sqlalchemy import bindparam, delete, insert, select, update

from shoal.model.node import Node, Window
from shoal.store.base import StaleRecord
from shoal.store.schema import nodes, windows
from shoal.store.session import Session, decode_node, decode_window, encode

MAX_CACHED_NODES = 1 << 14

INSERT_NODE = insert(nodes)
NODE_BY_NAME = select(nodes.c.body).where(nodes.c.name == bindparam("of"))
NODE_VERSION = select(nodes.c.version).where(nodes.c.name == bindparam("of"))
UPDATE_NODE = (
    update(nodes)
    .where(nodes.c.name == bindparam("of"))
    .values(version=bindparam("to_version"), body=bindparam("to_body"))
)
DELETE_NODE = delete(nodes).where(nodes.c.name == bindparam("of"))
ALL_NODES = select(nodes.c.body).order_by(nodes.c.name)


_decode_node_cached = lru_cache(maxsize=MAX_CACHED_NODES)(decode_node)
"""Loops read all nodes again and again, and few of them change."""


class NodeTable:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._run = session.run

    def put(self, node: Node) -> None:
        """Add the node, or replace the record whose version is one less. `StaleRecord` if that
        has moved on.
        """
        version = self._session.value(NODE_VERSION, {"of": node.name})
        if version is None:
            self._run(INSERT_NODE, {"name": node.name, "version": node.version, "body": encode(node)})
            return
        if version != node.version - 1:
            raise StaleRecord(f"node {node.name} is at version {version}, not {node.version - 1}")
        self._run(UPDATE_NODE, {"of": node.name, "to_version": node.version, "to_body": encode(node)})

    def get(self, name: str) -> Node | None:
        body = self._session.value(NODE_BY_NAME, {"of": name})
        return None if body is None else decode_node(body)

    def all(self) -> list[Node]:
        """By name."""
        return [_decode_node_cached(body) for (body,) in self._run(ALL_NODES)]

    def remove(self, name: str) -> None:
        """May be repeated."""
        self._run(DELETE_NODE, {"of": name})


MAX_CACHED_WINDOWS = 1 << 10

INSERT_WINDOW = insert(windows)
WINDOW_BY_ID = select(windows.c.body).where(windows.c.window_id == bindparam("of"))
ALL_WINDOWS = select(windows.c.body).order_by(windows.c.from_at, windows.c.window_id)
DELETE_WINDOW = delete(windows).where(windows.c.window_id == bindparam("of"))
PURGE_WINDOWS = delete(windows).where(windows.c.until_at <= bindparam("now"))


_decode_window_cached = lru_cache(maxsize=MAX_CACHED_WINDOWS)(decode_window)
"""Every plan reads all windows, and few change."""


class WindowTable:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._run = session.run

    def add(self, window: Window) -> None:
        times = {"from_at": window.from_at, "until_at": window.until_at}
        self._run(INSERT_WINDOW, {"window_id": window.window_id, **times, "body": encode(window)})

    def get(self, window_id: str) -> Window | None:
        body = self._session.value(WINDOW_BY_ID, {"of": window_id})
        return None if body is None else decode_window(body)

    def all(self) -> list[Window]:
        """The earliest to begin comes first. Some may be over."""
        return [_decode_window_cached(body) for (body,) in self._run(ALL_WINDOWS)]

    def open(self, now: float) -> list[Window]:
        """Windows that are not over."""
        return [window for window in self.all() if window.until_at > now]

    def remove(self, window_id: str) -> None:
        """May be repeated."""
        self._run(DELETE_WINDOW, {"of": window_id})

    def purge(self, now: float) -> None:
        """Remove windows that were over by then."""
        self._run(PURGE_WINDOWS, {"now": now})
