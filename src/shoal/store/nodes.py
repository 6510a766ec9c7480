"""Nodes: one whole record each, replaced under guard of its version."""

from __future__ import annotations

from functools import lru_cache

from sqlalchemy import bindparam, delete, insert, select, update

from shoal.model.node import Node
from shoal.store.base import Stale
from shoal.store.codec import decode_node, encode
from shoal.store.prepared import Session
from shoal.store.schema import nodes

MAX_KEPT = 1 << 14

INSERT = insert(nodes)
BY_NAME = select(nodes.c.body).where(nodes.c.name == bindparam("of"))
VERSION = select(nodes.c.version).where(nodes.c.name == bindparam("of"))
UPDATE = (
    update(nodes)
    .where(nodes.c.name == bindparam("of"))
    .values(version=bindparam("to_version"), body=bindparam("to_body"))
)
DELETE = delete(nodes).where(nodes.c.name == bindparam("of"))
ALL = select(nodes.c.body).order_by(nodes.c.name)


_decoded = lru_cache(maxsize=MAX_KEPT)(decode_node)
"""Loops look at all nodes again and again, and few of them change."""


class Nodes:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._run = session.run

    def put(self, node: Node) -> None:
        """Add it, or replace the record whose version is one less; `Stale` if that has moved on."""
        version = self._session.value(VERSION, {"of": node.name})
        if version is None:
            self._run(INSERT, {"name": node.name, "version": node.version, "body": encode(node)})
            return
        if version != node.version - 1:
            raise Stale(f"node {node.name} is at version {version}, not {node.version - 1}")
        self._run(UPDATE, {"of": node.name, "to_version": node.version, "to_body": encode(node)})

    def get(self, name: str) -> Node | None:
        body = self._session.value(BY_NAME, {"of": name})
        return None if body is None else decode_node(body)

    def all(self) -> list[Node]:
        """By name."""
        return [_decoded(body) for (body,) in self._run(ALL)]

    def remove(self, name: str) -> None:
        """May be repeated."""
        self._run(DELETE, {"of": name})
