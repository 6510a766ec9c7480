"""`shoal login`: save a server and the token to use there."""

from __future__ import annotations

import getpass
import os
import sys
from typing import Annotated
from urllib.parse import urlsplit

from cyclopts import Parameter

from shoal.cli.flags import JsonFlag
from shoal.cli.output import note, print_json
from shoal.cli.text import one_line
from shoal.client.connection import Connection
from shoal.client.credentials import LOCAL, Credentials, env_for_home, normalize_urls
from shoal.errors import SpecError
from shoal.home import home_from_env
from shoal.settings import LOOPBACK


def login(
    url: Annotated[
        str | None,
        Parameter(
            help="https://HOST:PORT, several of one cluster with commas, or `local` for this machine's own."
        ),
    ] = None,
    *,
    token_stdin: Annotated[bool, Parameter(negative="", help="Read the token from standard input.")] = False,
    forget: Annotated[bool, Parameter(negative="", help="Forget the server's token instead.")] = False,
    json: JsonFlag = False,
) -> int:
    """Save a server and a token, and use them from now on.

    `SHOAL_URL` takes precedence. Before the first login, and after `shoal
    login local`, commands talk to this machine's own server.

    Without a URL, print who you are and where. The token is read without
    echo, or from standard input: a flag would show it in `ps`.
    """
    saved = Credentials(home_from_env())
    if url is None:
        return _print_me(Connection(), json=json)
    server = LOCAL if url == LOCAL else normalize_urls(url)
    if forget:
        saved.forget(server)
        return 0
    if normalize_urls(os.environ.get("SHOAL_URL", server)) != server:
        note("note: SHOAL_URL is set and takes precedence over this login; `unset SHOAL_URL`")
    if server == LOCAL and saved.token(LOCAL):
        saved.use(LOCAL)
        return _print_me(Connection(env=env_for_home()), json=json)
    token = ask_token(server, token_stdin=token_stdin)
    env = {**env_for_home(), "SHOAL_TOKEN": token}
    connection = Connection(env=env) if server == LOCAL else Connection(server, token)
    code = _print_me(connection, json=json)
    saved.save(server, token, connection.transport.listener_uid if server != LOCAL else None)
    saved.use(server)
    for address in server.split(","):
        if address.startswith("http://") and urlsplit(address).hostname not in LOOPBACK:
            note(f"warning: {one_line(address)} is not encrypted; others on the way can read your token")
    return code


def ask_token(server: str, *, token_stdin: bool) -> str:
    """Return the token that was typed or piped. Raise `SpecError` if it cannot be a token."""
    token = sys.stdin.readline() if token_stdin or not sys.stdin.isatty() else getpass.getpass("token: ")
    token = token.strip()
    if not token:
        raise SpecError(
            "no token was given",
            hint=f"paste it when `shoal login {one_line(server)}` asks, or pipe it in with `--token-stdin`; "
            "`shoal token create` prints one where you are logged in",
        )
    if not token.startswith("sh") or not token.isascii() or " " in token:
        raise SpecError(
            "that is not a Shoal token; one starts with `shl_`", hint="`shoal token create` makes one"
        )
    return token


def _print_me(connection: Connection, *, json: bool) -> int:
    """Print which user the server says this is, and which server that is."""
    with connection as shoal:
        me = shoal.me()
        url = shoal.transport.endpoint.url
    if json:
        print_json({"url": url, **me})
        return 0
    role = f" ({me['cluster_role']})" if me.get("cluster_role") else ""
    print(f"you are {one_line(me.get('user') or me.get('actor'))}{role} at {one_line(url)}")
    for project in me.get("projects") or ():
        print(f"  {one_line(project['name'])}: {one_line(project['role'])}")
    return 0
