"""Messages at the edge of HTTP, compared with nginx: the data plane accepts nothing that nginx refuses."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.faults.http_cases import ACCEPTED, REFUSED, all_cases, verdict_of
from tests.support.serving.data_plane_lab import ClientConnection, Conversation, FakeReplica, reply, until

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
WAIT_S = 10.0
CONFIG = """
daemon off; master_process off; pid {place}/pid; error_log {place}/error.log; worker_processes 1;
events {{ worker_connections 2048; }}
http {{
  access_log off; client_body_temp_path {place}/body; proxy_temp_path {place}/proxy;
  fastcgi_temp_path {place}/f; uwsgi_temp_path {place}/u; scgi_temp_path {place}/s;
  server {{
    listen unix:{place}/nginx.sock;
    location / {{ proxy_pass http://{address}; proxy_http_version 1.1; proxy_set_header Connection ""; }}
  }}
}}
"""

pytestmark = pytest.mark.skipif(NGINX is None, reason="no nginx here: apt-get install nginx-light")


async def echo(seen: Conversation) -> None:
    await seen.body()
    await seen.send(reply(b"" if seen.request.start_line.startswith("HEAD") else b"ok"))


@pytest.fixture
async def nginx(tmp_path: Path) -> AsyncIterator[Path]:
    assert NGINX is not None
    replica = await FakeReplica("one", echo).start()
    config = tmp_path / "nginx.conf"
    config.write_text(CONFIG.format(place=tmp_path, address=replica.address))
    process = await asyncio.create_subprocess_exec(
        NGINX, "-e", str(tmp_path / "error.log"), "-p", str(tmp_path), "-c", str(config)
    )
    await until((tmp_path / "nginx.sock").exists)
    yield tmp_path / "nginx.sock"
    process.kill()
    await process.wait()
    await replica.stop()


async def verdict(socket: Path, raw: bytes) -> str:
    return await verdict_of(ClientConnection(*await asyncio.open_unix_connection(str(socket))), raw, WAIT_S)


async def test_nginx_decides_as_the_data_plane_except_for_listed_cases(nginx: Path) -> None:
    cases = {case.name: case for case in all_cases()}
    verdicts = [verdict(nginx, case.raw.replace(b"{path}", b"/p/s/")) for case in cases.values()]
    seen = dict(zip(cases, await asyncio.gather(*verdicts), strict=True))
    looser = [n for n, case in cases.items() if case.verdict == ACCEPTED and seen[n] == REFUSED]
    silent = [n for n, case in cases.items() if case.verdict != seen[n] and not case.nginx_differs]
    assert (looser, silent) == ([], [])
