"""`shoal token`: make, list and revoke tokens. A token's text is printed once, when it is made."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from shoal.cli.flags import JsonFlag, connect
from shoal.cli.show import note, print_json, print_table
from shoal.cli.text import duration, one_line
from shoal.errors import SpecError

app = App(name="token", help="Tokens: create, list, revoke.")
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
    now = time.time()
    rows = ((t["id"], may(t), t.get("project") or "all", state(t, now), t.get("label") or "") for t in found)
    print_table(("TOKEN", "SCOPE", "PROJECT", "STATE", "LABEL"), rows, elastic="LABEL")
    return 0


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
    token_id: Annotated[str, Parameter(help="As `shoal token` lists it.")], *, json: JsonFlag = False
) -> int:
    """Make a token worthless from now on; open streams end too."""
    with connect() as shoal:
        revoked = shoal.tokens.revoke(token_id)
    is_confirmed = bool(revoked.get("is_confirmed", True))
    if json:
        print_json({"id": token_id, "is_revoked": True, "is_confirmed": is_confirmed})
        return 0
    print(f"token {one_line(token_id)} revoked")
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
