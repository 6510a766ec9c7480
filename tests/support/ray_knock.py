"""Try listeners of Ray's: `RAY_PYTHON ray_knock.py < TRIES`, alone, in whichever network.

A try is a host, a port, what to say (`POST /path` of gRPC as `/service/method`, or `GET /path` of HTTP), and
a token or null. Prints in their order what became of them: gRPC's word, HTTP's number, or that it is neither.
"""

from __future__ import annotations

import http.client
import json
import sys

import grpc

TIMEOUT_S = 10.0


def call(host: str, port: int, method: str, token: str | None) -> str:
    """One empty request: everything in it has a default."""
    with grpc.insecure_channel(f"{host}:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        given = [("authorization", f"Bearer {token}")] if token is not None else []
        try:
            channel.unary_unary(method)(b"", timeout=TIMEOUT_S, metadata=given)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"


def get(host: str, port: int, path: str, token: str | None) -> str:
    link = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        link.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token is not None else {})
        return str(link.getresponse().status)
    except (OSError, http.client.HTTPException) as error:
        return f"no HTTP: {type(error).__name__}"
    finally:
        link.close()


def tried(host: str, port: int, said: str, token: str | None) -> str:
    if said.startswith("GET "):
        return get(host, port, said.removeprefix("GET "), token)
    return call(host, port, said, token)


if __name__ == "__main__":
    print(json.dumps([tried(*one) for one in json.load(sys.stdin)]))
