"""`shoal token`: create, list and revoke tokens. A token's text is printed once, when it is created."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from shoal.cli.flags import JsonFlag, connect
from shoal.cli.output import note, print_json, print_table
from shoal.cli.text import duration, one_line
from shoal.errors import SpecError

app = App(name="token", help="Tokens: create, list, revoke.")
SHOWN = 5
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@app.default
@app.command(name="list")
def list_tokens(
    *,
    user: Annotated[str | None, Parameter(help="Tokens of this user (admins); by default your own.")] = None,
    json: JsonFlag = False,
) -> int:
    """List your tokens, or those of a user. Their text is never listed."""
    with connect() as shoal:
        tokens = shoal.tokens.all(user=user)
    if json:
        print_json(tokens)
        return 0
    now, users = time.time(), {t.get("user") for t in tokens}
    columns = ["TOKEN", "SCOPE", "PROJECT", "STATE", "LABEL"]
    rows = [
        [
            f"{'- ' * depth}{t['id']}",
            allowed_text(t),
            t.get("project") or "all",
            state_text(t, now),
            t.get("label") or "",
        ]
        for depth, t in as_tree(tokens)
    ]
    if len(users) > 1:
        columns.insert(1, "USER")
        for row, (_, t) in zip(rows, as_tree(tokens), strict=True):
            row.insert(1, str(t.get("user")))
    print_table(columns, rows, elastic="LABEL")
    if any(t.get("parent") for t in tokens):
        note("a token stands below the token it was created with, and is revoked with it")
    return 0


def as_tree(tokens: Sequence[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Return each token with its depth, right after the token it was created with if that is listed too."""
    listed = {token["id"] for token in tokens}
    below: dict[str | None, list[dict[str, Any]]] = {}
    for token in tokens:
        parent = token.get("parent")
        below.setdefault(parent if parent in listed else None, []).append(token)
    ordered: list[tuple[int, dict[str, Any]]] = []
    waiting = [(0, token) for token in reversed(below.get(None, []))]
    while waiting:
        depth, token = waiting.pop()
        ordered.append((depth, token))
        waiting += [(depth + 1, child) for child in reversed(below.get(token["id"], []))]
    return ordered


@app.command
def create(
    *,
    user: Annotated[str | None, Parameter(help="For this user; by default yourself.")] = None,
    scope: Annotated[
        Literal["viewer", "member", "lead", "operator", "admin"] | None, Parameter(help="The most it may do.")
    ] = None,
    project: Annotated[
        str | None, Parameter(name=["--project", "-p"], help="Valid in this project only.")
    ] = None,
    service: Annotated[str | None, Parameter(help="Valid only to call this service of the project.")] = None,
    lifetime: Annotated[str | None, Parameter(help="Such as `12h` or `30d`; by default without end.")] = None,
    label: Annotated[str, Parameter(help="What it is for.")] = "",
    json: JsonFlag = False,
) -> int:
    """Create a token and print it once, alone on standard output."""
    seconds = lifetime_s(lifetime) if lifetime else None
    with connect() as shoal:
        created = shoal.tokens.create(
            user=user, scope=scope, project=project, service=service, lifetime_s=seconds, label=label
        )
        is_served = service is None or any(
            listed["name"] == service for listed in shoal.services.all(project=created["project"])
        )
    if json:
        print_json(created)
        return 0
    print(created["text"])
    if not is_served:
        ref = f"{one_line(created['project'])}/{one_line(service)}"
        note(f"there is no service `{ref}` now; see `shoal services`")
    if seconds is not None and (ends := created.get("expires_at")) and ends < time.time() + seconds - 1:
        note(f"it ends in {duration(ends - time.time())}, with the token that it was created with")
    note(scope_text(created, user, is_chosen=scope is not None))
    use = "as `Authorization: Bearer TOKEN`" if service else "with `shoal login URL`, or as SHOAL_TOKEN"
    note(f"it is not shown again; use it {use}")
    return 0


def scope_text(token: dict[str, Any], user: str | None, *, is_chosen: bool) -> str:
    """Say what the token may do, and why that much."""
    if token.get("service"):
        return (
            f"it can call service {one_line(token['service'])} of {one_line(token['project'])}, nothing else"
        )
    where = f" in project {one_line(token['project'])} alone" if token.get("project") else ""
    text = f"scope {token['scope']}{where}"
    if is_chosen:
        return text
    whose = f"all that {one_line(user)} may" if user else "all that you may"
    most = whose if token["scope"] == "admin" else f"{whose}, and no more than {token['scope']}"
    return f"{text}, as your own token has: it may do {most}; `--scope viewer` only reads"


@app.command
def revoke(
    token_id: Annotated[str, Parameter(help="The id, as `shoal token` lists it.")],
    *,
    keep_children: Annotated[
        bool, Parameter(negative="", help="Keep the tokens created with it, under its own parent.")
    ] = False,
    json: JsonFlag = False,
) -> int:
    """Revoke a token and all tokens created with it; open streams end too."""
    with connect() as shoal:
        revoked = shoal.tokens.revoke(token_id, keep_children=keep_children)
    is_confirmed = bool(revoked.get("is_confirmed", True))
    with_it, kept = revoked.get("revoked_with_it") or [], revoked.get("kept") or []
    if json:
        result = {"id": token_id, "is_revoked": True, "is_confirmed": is_confirmed}
        print_json({**result, "revoked_with_it": with_it, "kept": kept})
        return 0
    also = f", and {len(with_it)} created with it" if with_it else ""
    print(f"token {one_line(token_id)} revoked{also}")
    if kept:
        note(f"{len(kept)} created with it stay valid: {', '.join(map(one_line, kept[:SHOWN]))}")
    if not is_confirmed:
        note(
            "not every data plane has confirmed it, so some may still accept the token; repeat the command "
            "until this note is gone"
        )
    return 0


def allowed_text(token: dict[str, Any]) -> str:
    """Return the most it may do: the role it is limited to, or the one service it can call."""
    return f"calls {token['service']}" if token.get("service") else str(token["scope"])


def state_text(token: dict[str, Any], now: float) -> str:
    if token.get("revoked_at"):
        return "revoked"
    expires = token.get("expires_at")
    if expires is None:
        return "valid"
    return f"valid for {duration(expires - now)}" if expires > now else "expired"


def lifetime_s(text: str) -> float:
    """Return the seconds of `90`, `12h` or `30d`."""
    match = re.fullmatch(r"(\d{1,9})([smhdw]?)", text)
    if not match:
        raise SpecError(f"lifetime `{text}` is not a number with s, m, h, d or w", hint="`--lifetime 30d`")
    return float(int(match[1]) * UNITS[match[2] or "s"])
