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


def call_grpc(host: str, port: int, method: str, token: str | None) -> str:
    """One empty request: everything in it has a default."""
    with grpc.insecure_channel(f"{host}:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        passed = [("authorization", f"Bearer {token}")] if token is not None else []
        try:
            channel.unary_unary(method)(b"", timeout=TIMEOUT_S, metadata=passed)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"


def get_http(host: str, port: int, path: str, token: str | None) -> str:
    link = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        link.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token is not None else {})
        return str(link.getresponse().status)
    except (OSError, http.client.HTTPException) as error:
        return f"no HTTP: {type(error).__name__}"
    finally:
        link.close()


def try_request(host: str, port: int, request: str, token: str | None) -> str:
    if request.startswith("GET "):
        return get_http(host, port, request.removeprefix("GET "), token)
    return call_grpc(host, port, request, token)


if __name__ == "__main__":
    print(json.dumps([try_request(*request) for request in json.load(sys.stdin)]))
