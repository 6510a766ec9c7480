"""`shoal token`: make, list and revoke tokens. A token's text is printed once, when it is made."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from shoal.cli.flags import JsonFlag, connect
from shoal.cli.show import note, print_json, print_table
from shoal.cli.text import duration, one_line
from shoal.errors import SpecError

app = App(name="token", help="Tokens: create, list, revoke.")
SHOWN = 5
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@app.default
@app.command(name="list")
def list_tokens(
    *,
    user: Annotated[str | None, Parameter(help="Of this user (admins); your own if not given.")] = None,
    json: JsonFlag = False,
) -> int:
    """List your tokens, or a user's. Never their text."""
    with connect() as shoal:
        found = shoal.tokens.all(user=user)
    if json:
        print_json(found)
        return 0
    now, users = time.time(), {t.get("user") for t in found}
    columns = ["TOKEN", "SCOPE", "PROJECT", "STATE", "LABEL"]
    rows = [
        [f"{'- ' * depth}{t['id']}", may(t), t.get("project") or "all", state(t, now), t.get("label") or ""]
        for depth, t in as_tree(found)
    ]
    if len(users) > 1:
        columns.insert(1, "USER")
        for row, (_, t) in zip(rows, as_tree(found), strict=True):
            row.insert(1, str(t.get("user")))
    print_table(columns, rows, elastic="LABEL")
    if any(t.get("parent") for t in found):
        note("a token stands below the one it was made with, and is revoked with it")
    return 0


def as_tree(found: Sequence[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Each token with its depth, right after the token it was made with if that one is listed, too."""
    listed = {token["id"] for token in found}
    below: dict[str | None, list[dict[str, Any]]] = {}
    for token in found:
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
    user: Annotated[str | None, Parameter(help="For this user; yourself if not given.")] = None,
    scope: Annotated[
        Literal["viewer", "member", "lead", "operator", "admin"] | None, Parameter(help="The most it may do.")
    ] = None,
    project: Annotated[
        str | None, Parameter(name=["--project", "-p"], help="Good in this project alone.")
    ] = None,
    service: Annotated[str | None, Parameter(help="Only to call this service of the project.")] = None,
    lifetime: Annotated[str | None, Parameter(help="Such as `12h` or `30d`; for ever if not given.")] = None,
    label: Annotated[str, Parameter(help="What it is for.")] = "",
    json: JsonFlag = False,
) -> int:
    """Make a token and print it: this once, on standard output alone."""
    seconds = lifetime_s(lifetime) if lifetime else None
    with connect() as shoal:
        made = shoal.tokens.create(
            user=user, scope=scope, project=project, service=service, lifetime_s=seconds, label=label
        )
        is_served = service is None or any(
            one["name"] == service for one in shoal.services.all(project=made["project"])
        )
    if json:
        print_json(made)
        return 0
    print(made["text"])
    if not is_served:
        note(
            f"there is no service `{one_line(made['project'])}/{one_line(service)}` now; see `shoal services`"
        )
    if seconds is not None and (ends := made.get("expires_at")) and ends < time.time() + seconds - 1:
        note(f"it ends in {duration(ends - time.time())}, with the token that it was made with")
    note(reach(made, user, is_chosen=scope is not None))
    use = "as `Authorization: Bearer TOKEN`" if service else "with `shoal login URL`, or as SHOAL_TOKEN"
    note(f"shown this once; use it {use}")
    return 0


def reach(made: dict[str, Any], user: str | None, *, is_chosen: bool) -> str:
    """What the token is good for, and why that much."""
    if made.get("service"):
        return f"it calls service {one_line(made['service'])} of {one_line(made['project'])}, nothing else"
    where = f" in project {one_line(made['project'])} alone" if made.get("project") else ""
    told = f"scope {made['scope']}{where}"
    if is_chosen:
        return told
    whose = f"all that {one_line(user)} may" if user else "all that you may"
    most = whose if made["scope"] == "admin" else f"{whose}, and no more than {made['scope']}"
    return f"{told}, that of your own token: it may do {most}; `--scope viewer` would only look"


@app.command
def revoke(
    token_id: Annotated[str, Parameter(help="As `shoal token` lists it.")],
    *,
    keep_children: Annotated[
        bool, Parameter(negative="", help="Tokens made with it stay, as if made with the one above it.")
    ] = False,
    json: JsonFlag = False,
) -> int:
    """Make a token and all that was made with it worthless from now on; open streams end too."""
    with connect() as shoal:
        revoked = shoal.tokens.revoke(token_id, keep_children=keep_children)
    is_confirmed = bool(revoked.get("is_confirmed", True))
    with_it, kept = revoked.get("revoked_with_it") or [], revoked.get("kept") or []
    if json:
        told = {"id": token_id, "is_revoked": True, "is_confirmed": is_confirmed}
        print_json({**told, "revoked_with_it": with_it, "kept": kept})
        return 0
    also = f", and {len(with_it)} that were made with it" if with_it else ""
    print(f"token {one_line(token_id)} revoked{also}")
    if kept:
        note(f"{len(kept)} that were made with it stay good: {', '.join(map(one_line, kept[:SHOWN]))}")
    if not is_confirmed:
        note("not every data plane has confirmed it: some may honour it until the same command says no more")
    return 0


def may(token: dict[str, Any]) -> str:
    """The most it may do: as somebody of that role, or nothing but to call one service."""
    return f"calls {token['service']}" if token.get("service") else str(token["scope"])


def state(token: dict[str, Any], now: float) -> str:
    if token.get("revoked_at"):
        return "revoked"
    expires = token.get("expires_at")
    if expires is None:
        return "good"
    return f"good for {duration(expires - now)}" if expires > now else "expired"


def lifetime_s(text: str) -> float:
    """`90`, `12h`, `30d` in seconds."""
    match = re.fullmatch(r"(\d{1,9})([smhdw]?)", text)
    if not match:
        raise SpecError(f"lifetime `{text}` is not a number with s, m, h, d or w", hint="`--lifetime 30d`")
    return float(int(match[1]) * UNITS[match[2] or "s"])
