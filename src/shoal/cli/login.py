"""`shoal login`: remember a server and the token to use there."""

from __future__ import annotations

import getpass
import os
import sys
from typing import Annotated, Any
from urllib.parse import urlsplit

from cyclopts import Parameter

from shoal.cli.flags import JsonFlag
from shoal.cli.show import note, print_json
from shoal.cli.text import one_line
from shoal.client.connection import Connection
from shoal.client.credentials import LOCAL, Credentials
from shoal.errors import SpecError
from shoal.settings import LOOPBACK, home_from_env


def login(
    url: Annotated[
        str | None, Parameter(help="https://HOST:PORT, or `local` for this machine's own.")
    ] = None,
    *,
    token_stdin: Annotated[bool, Parameter(negative="", help="Read the token from standard input.")] = False,
    forget: Annotated[bool, Parameter(negative="", help="Forget the server's token instead.")] = False,
    json: JsonFlag = False,
) -> int:
    """Remember a server and a token, and talk to it from now on.

    Without a URL, say who you are. The token is asked for without echo, or read
    from standard input: a flag would show it in `ps`.
    """
    saved = Credentials(home_from_env())
    if url is None:
        return _print_me(_me(Connection()), json=json)
    server = LOCAL if url == LOCAL else url.rstrip("/")
    if forget:
        saved.forget(server)
        return 0
    if server == LOCAL and saved.token(LOCAL):
        saved.use(LOCAL)
        return _print_me(_me(Connection()), json=json)
    token = ask_token(token_stdin=token_stdin)
    who = (
        Connection(env={**os.environ, "SHOAL_TOKEN": token}) if server == LOCAL else Connection(server, token)
    )
    me = _me(who)
    saved.save(server, token)
    if server.startswith("http://") and urlsplit(server).hostname not in LOOPBACK:
        note(f"warning: {one_line(server)} is not encrypted; others on the way can read your token")
    return _print_me(me, json=json)


def ask_token(*, token_stdin: bool) -> str:
    """The token as typed or piped. Raises `SpecError` if it cannot be one."""
    token = sys.stdin.readline() if token_stdin or not sys.stdin.isatty() else getpass.getpass("token: ")
    token = token.strip()
    if not token.startswith("sh") or not token.isascii() or " " in token:
        raise SpecError(
            "that is not a Shoal token; one starts with `shl_`", hint="`shoal token create` makes one"
        )
    return token


def _me(connection: Connection) -> dict[str, Any]:
    with connection as shoal:
        return shoal.me()


def _print_me(me: dict[str, Any], *, json: bool) -> int:
    if json:
        print_json(me)
        return 0
    role = f" ({me['cluster_role']})" if me.get("cluster_role") else ""
    print(f"you are {one_line(me.get('user') or me.get('actor'))}{role}")
    for project in me.get("projects") or ():
        print(f"  {one_line(project['name'])}: {one_line(project['role'])}")
    return 0
