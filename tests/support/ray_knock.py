"""Try a listener of Ray's: `RAY_PYTHON ray_knock.py HOST PORT < TRIES`, alone, in whichever network.

A try is a name, what to say (`POST /path` of gRPC as `/service/method`, or `GET /path` of HTTP), and a token
or null. Prints by name what became of it: gRPC's word, or HTTP's number, or that it is neither.
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


def main(host: str, port: str) -> int:
    told = {}
    for name, said, token in json.load(sys.stdin):
        if said.startswith("GET "):
            told[name] = get(host, int(port), said.removeprefix("GET "), token)
        else:
            told[name] = call(host, int(port), said, token)
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
