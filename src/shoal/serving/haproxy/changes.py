"""From one rendering to the next: what can be said to a running HAProxy, and what needs a reload. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from shoal.serving.haproxy.backends import Server
from shoal.serving.haproxy.render import CALLERS, Rendering

Servers = Mapping[str, Server]


def needs_reload(before: Rendering, after: Rendering, leaving: Collection[str]) -> bool:
    """Whether anything but callers, weights and which servers there are is different.

    `leaving`: servers, as `backend/name`, that have been taken out and are not gone yet.
    """
    if before.frame != after.frame:
        return True
    old, new = flat(before), flat(after)
    return any(
        name in leaving
        if name not in old
        else (old[name].address, old[name].options) != (server.address, server.options)
        for name, server in new.items()
    )


def flat(rendering: Rendering) -> dict[str, Server]:
    """By the name that HAProxy's commands take."""
    return {
        f"{backend}/{server.name}": server
        for backend, servers in rendering.servers.items()
        for server in servers
    }


def added(before: Rendering, after: Rendering) -> Iterator[str]:
    """Commands for servers that are new; they start outside, and are checked from the beginning."""
    old = flat(before)
    for name, server in flat(after).items():
        if name not in old:
            yield f"add server {name} {server.address} {server.options} weight {server.weight}"
            yield f"enable health {name}"
            yield f"enable server {name}"


def weighed(before: Rendering, after: Rendering) -> Iterator[str]:
    """Commands for servers that get more or less than before, or nothing new (weight 0)."""
    old = flat(before)
    for name, server in flat(after).items():
        if name in old and old[name].weight != server.weight:
            yield f"set server {name} weight {server.weight}"


def removed(before: Rendering, after: Rendering) -> list[str]:
    """Servers that get nothing any more, and are deleted once what they have is finished."""
    return sorted(flat(before).keys() - flat(after).keys())


def called(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    """Commands for the map of callers. Who may not any more comes first."""
    for key in before.keys() - after.keys():
        yield f"del map {CALLERS} {key}"
    for key, value in after.items():
        if key not in before:
            yield f"add map {CALLERS} {key} {escaped(value)}"
        elif before[key] != value:
            yield f"set map {CALLERS} {key} {escaped(value)}"


def escaped(value: str) -> str:
    """As an argument of a command: it would end at a space, and a semicolon would begin another."""
    return "".join(char if char.isalnum() or char in "_.-@" else f"\\{char}" for char in value)
