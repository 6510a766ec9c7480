"""Users, projects and tokens, as an administrator or a project's lead manages them."""

from __future__ import annotations

from typing import Any

from shoal.client.transport import Transport, path_of

Answer = dict[str, Any]
REMOVABLE = frozenset({"parent", "quota", "limit", "borrow"})


def items_of(transport: Transport, path: str, **params: Any) -> list[Answer]:
    """Every item of a paginated list."""
    found: list[Answer] = []
    cursor: str | None = None
    while True:
        page = transport.call("GET", path, params={**params, "cursor": cursor})
        if isinstance(page, list):
            return [dict(item) for item in page]
        found += page["items"]
        cursor = page.get("next_cursor")
        if not cursor:
            return found


class Users:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def all(self) -> list[Answer]:
        return items_of(self._transport, path_of("users"))

    def create(self, name: str, *, cluster_role: str | None = None) -> Answer:
        body = {"name": name, "cluster_role": cluster_role}
        return dict(self._transport.call("POST", path_of("users"), json_body=body))

    def update(self, name: str, **changes: Any) -> Answer:
        """`is_active` or `cluster_role`; what is not named stays."""
        return dict(self._transport.call("PATCH", path_of("users", name), json_body=changes))


class Projects:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def all(self) -> list[Answer]:
        return items_of(self._transport, path_of("projects"))

    def create(self, name: str, **settings: Any) -> Answer:
        """`max_open_jobs max_jobs_per_day max_priority max_upload_bytes parent quota limit borrow weight`.

        None takes the server's default. `quota`, `limit` and `borrow` are a number of GPUs, or as many of
        each as `{"gpus": 64, "cpus": 512}`.
        """
        body = {"name": name, **_sent(settings)}
        return dict(self._transport.call("POST", path_of("projects"), json_body=body))

    def update(self, name: str, **settings: Any) -> Answer:
        """The same; None changes nothing, and "none" takes a parent, quota, limit or borrow away."""
        body = _sent(settings)
        return dict(self._transport.call("PATCH", path_of("projects", name), json_body=body))

    def members(self, name: str) -> list[Answer]:
        return items_of(self._transport, path_of("projects", name, "members"))

    def set_member(self, name: str, user: str, role: str) -> Answer:
        path = path_of("projects", name, "members", user)
        return dict(self._transport.call("PUT", path, json_body={"role": role}))

    def remove_member(self, name: str, user: str) -> None:
        self._transport.call("DELETE", path_of("projects", name, "members", user))


def _sent(settings: dict[str, Any]) -> dict[str, Any]:
    """`quota=64` as GPUs, and "none" as nothing."""
    sent = {name: value for name, value in settings.items() if value is not None}
    for name in REMOVABLE & sent.keys():
        if sent[name] == "none":
            sent[name] = None
        elif isinstance(sent[name], int):
            sent[name] = {"gpus": sent[name]}
    return sent


class Tokens:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def all(self, *, user: str | None = None) -> list[Answer]:
        """Your own, or those of the user named."""
        return items_of(self._transport, path_of("tokens"), user=user)

    def create(self, **fields: Any) -> Answer:
        """`label scope project service user lifetime_s`. The answer's `text` is shown this once."""
        body = {k: v for k, v in fields.items() if v is not None}
        return dict(self._transport.call("POST", path_of("tokens"), json_body=body))

    def revoke(self, token_id: str, *, keep_children: bool = False) -> Answer:
        """Also ends what was made with it, unless `keep_children`.

        Not `is_confirmed`: a data plane that did not answer may honour it for a while.
        """
        params = {"keep_children": "true"} if keep_children else None
        return dict(self._transport.call("DELETE", path_of("tokens", token_id), params=params))
