"""How the other proxies are configured: as their guides advise for speed, with as few settings as possible
otherwise.
"""

from __future__ import annotations

NGINX = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  keepalive_requests 1000000;
  upstream back {{ random two least_conn; {servers} keepalive 512; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=2048;
    location / {{
      proxy_pass http://back; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_request_buffering off;
    }}
  }}
}}
"""
HAPROXY = """
global
  nbthread 1
  maxconn 8192
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
  http-reuse always
  option http-no-delay
frontend front
  bind 127.0.0.1:{port} backlog 2048
  default_backend back
backend back
  balance random(2)
{servers}
"""
ENVOY_ROUTER = {
    "name": "envoy.filters.http.router",
    "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
}


def envoy_config(port: int, behind: list[int]) -> dict[str, object]:
    """Every request goes to whichever of two random upstreams has fewer requests."""

    def address(upstream_port: int) -> dict[str, object]:
        return {"address": {"socket_address": {"address": "127.0.0.1", "port_value": upstream_port}}}

    route = {"match": {"prefix": "/"}, "route": {"cluster": "back", "timeout": "0s"}}
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3"
        ".HttpConnectionManager",
        "stat_prefix": "front",
        "http_filters": [ENVOY_ROUTER],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
    }
    speaks = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    listener = {"name": "front", **address(port), "filter_chains": [{"filters": [speaks]}]}
    ends = [{"endpoint": address(upstream_port)} for upstream_port in behind]
    cluster = {
        "name": "back",
        "type": "STATIC",
        "connect_timeout": "5s",
        "lb_policy": "LEAST_REQUEST",
        "load_assignment": {"cluster_name": "back", "endpoints": [{"lb_endpoints": ends}]},
    }
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}
