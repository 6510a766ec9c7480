"""The configuration of one control plane, from flags, `SHOAL_*` variables and defaults.

It is checked once, here, so a `Settings` that exists is safe to start. This module opens and reads no file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from shoal.errors import SpecError
from shoal.home import home_from_env

DEFAULT_PORT = 7462
DEFAULT_SERVE_PORT = 7463
DEFAULT_QUEUE = "default"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - refused without TLS or a declared proxy
OPTIONS = (
    "listen",
    "database_url",
    "demo",
    "tls_cert",
    "tls_key",
    "behind_proxy",
    "allowed_hosts",
    "mount_roots",
    "queues",
    "policy",
    "keep_logs",
    "max_kept_bytes",
    "max_cache_bytes",
    "serve_on",
    "data_plane",
    "serve_processes",
    "shared",
    "anchor_copy",
    "engine",
    "nodes_on",
    "nodes_urls",
)
"""The options that a flag of `shoal up` or a variable `SHOAL_...` can set, as text."""
MAX_QUEUE_NAME = 100
QUEUE_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{MAX_QUEUE_NAME - 1}}}")
DATA_PLANES = ("embedded", "haproxy")
MAX_DEMO_NODES = 10_000
MAX_DEMO_GPUS = 1024
MAX_SERVE_PROCESSES = 64


@dataclass(frozen=True, kw_only=True)
class DemoNodes:
    """Simulated nodes to add: `16x8` is 16 nodes of 8 fake GPUs each."""

    num_nodes: int
    gpus_per_node: int

    def __str__(self) -> str:
        return f"{self.num_nodes}x{self.gpus_per_node}"


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Limits for one request, one upload or one caller."""

    max_body_bytes: int = 4 << 20
    max_archive_bytes: int = 256 << 20
    max_archive_files: int = 20_000
    max_unpacked_bytes: int = 4 << 30
    max_project_archive_bytes: int = 10 << 30
    """All snapshots of one project, including unfinished uploads."""
    max_streams: int = 1000
    max_streams_per_actor: int = 100
    max_tokens_per_user: int = 100
    """Counts valid tokens, which are neither revoked nor expired."""
    max_tokens_per_service: int = 100


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A complete, checked configuration. `port` 0 lets the kernel choose."""

    home: Path
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    database_url: str = ""
    """Empty: `shoal.db` in `home`. Read `store_url`."""
    demo: DemoNodes | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    is_behind_proxy: bool = False
    allowed_hosts: tuple[str, ...] = ()
    """Host names of this server in addition to its own address and `localhost`."""
    mount_roots: tuple[Path, ...] = ()
    """Jobs may mount only these directories and what is below them."""
    queues: tuple[str, ...] = (DEFAULT_QUEUE,)
    """The names of all queues. Each queue reserves nodes for its first job, so users cannot add queues."""
    policy: Path | None = None
    """A file with the scheduler's non-default settings."""
    keep_logs_s: float = 30 * 86400.0
    """Logs and checkpoints of jobs that ended longer ago are removed."""
    max_kept_bytes: int = 10 << 30
    """Logs of ended attempts beyond this are removed, oldest first."""
    max_cache_bytes: int = 50 << 30
    """The limit for one project's caches on one node. 0: no cache outlives an attempt."""
    serve_host: str = "127.0.0.1"
    serve_port: int = DEFAULT_SERVE_PORT
    """The port of the data plane. If it is in use, the data plane takes another one."""
    data_plane: str = "embedded"
    """Which of `DATA_PLANES` serves services."""
    serve_processes: int = 1
    """The number of data plane processes on that port."""
    shared: Path | None = None
    """The directory for state outside the database, if several control planes share one database. None: there
    is one control plane, and its state is in `home`."""
    anchor_copy: Path | None = None
    """A second directory for the anchor of the event log. None: the anchor is only in the home."""
    engine: str = "local"
    """The engine's name in `engines/registry.py`."""
    nodes_host: str = ""
    """The address at which supervisors on other machines reach this control plane, over TLS with the
    home's own authority. Empty: no supervisor is on another machine."""
    nodes_port: int = 0
    nodes_urls: tuple[str, ...] = ()
    """All control plane addresses for those supervisors, if the cluster has more than this one."""
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self) -> None:
        problems = tuple(_problems(self))
        if problems:
            raise SpecError(
                "; ".join(problems),
                problems=problems,
                hint="see every option with `shoal up --help`",
            )

    @property
    def store_url(self) -> str:
        return self.database_url or f"sqlite:///{self.home / 'shoal.db'}"

    @property
    def is_loopback(self) -> bool:
        return self.host in LOOPBACK

    @property
    def url(self) -> str:
        """The URL for clients on this machine."""
        scheme = "https" if self.tls_cert else "http"
        host = "localhost" if self.host in EVERYWHERE else self.host
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def urls_for_supervisors(self) -> tuple[str, ...]:
        """The URLs that supervisors on other machines try in turn. Empty: there are none."""
        if self.nodes_urls or not self.nodes_host:
            return self.nodes_urls
        return (self._nodes_url,)

    @property
    def has_other_machines(self) -> bool:
        """Whether supervisors run on other machines and use this control plane's address for nodes."""
        return self.engine != "local" and bool(self.urls_for_supervisors)

    @property
    def url_for_supervisors(self) -> str:
        """The URL of this control plane for supervisors."""
        if not self.has_other_machines:
            return self.url
        return self._nodes_url if self.nodes_host else self.urls_for_supervisors[0]

    @property
    def _nodes_url(self) -> str:
        host = self.nodes_host
        return f"https://{f'[{host}]' if ':' in host else host}:{self.nodes_port}"

    @property
    def server_file(self) -> Path:
        return self.home / "server.json"

    @property
    def state_dir(self) -> Path:
        """The directory of keys, archives, checkpoints and the spool, which every leader needs."""
        return self.shared or self.home

    @property
    def is_bound_to_machine(self) -> bool:
        """Whether jobs run on the control plane's own machine, and no other machine reads its home."""
        return self.engine == "local" and self.shared is None

    @property
    def leader_file(self) -> Path:
        """The file in which the leader writes its address for the supervisors that use the spool."""
        return self.shared / "leader.json" if self.shared else self.server_file

    @property
    def log_file(self) -> Path:
        return self.home / "logs" / "control.log"


def merge_options(
    flags: Mapping[str, str | None],
    env: Mapping[str, str] = os.environ,
    remembered: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Merge options as text. Flags that are not None override `SHOAL_*` variables, which override
    `remembered`.
    """
    merged = {name: str(text) for name, text in (remembered or {}).items() if name in OPTIONS}
    merged |= {name: env[variable] for name in OPTIONS if env.get(variable := f"SHOAL_{name.upper()}")}
    return merged | {name: text for name, text in flags.items() if text is not None}


def load_settings(
    options: Mapping[str, str | None] | None = None, env: Mapping[str, str] = os.environ
) -> Settings:
    """Build the settings from options as text, then `SHOAL_*` variables, then defaults.

    Raise `SpecError` with the value seen and a valid one.
    """
    merged = merge_options(options or {}, env)
    limits = {
        f.name: _whole(env[name], name)
        for f in fields(ServerLimits)
        if env.get(name := f"SHOAL_{f.name.upper()}")
    }
    host, port = parse_listen(merged["listen"]) if "listen" in merged else ("127.0.0.1", DEFAULT_PORT)
    serve_on = parse_listen(merged["serve_on"]) if "serve_on" in merged else ("127.0.0.1", DEFAULT_SERVE_PORT)
    nodes_on = parse_listen(merged["nodes_on"]) if merged.get("nodes_on", "none") != "none" else ("", 0)
    return Settings(
        home=home_from_env(env),
        host=host,
        port=port,
        database_url=merged.get("database_url", ""),
        demo=parse_demo(merged.get("demo", "none")),
        tls_cert=Path(merged["tls_cert"]).absolute() if merged.get("tls_cert") else None,
        tls_key=Path(merged["tls_key"]).absolute() if merged.get("tls_key") else None,
        is_behind_proxy=merged.get("behind_proxy", "").lower() in ("1", "true", "yes", "on"),
        allowed_hosts=tuple(_parts(merged.get("allowed_hosts", ""))),
        mount_roots=tuple(Path(part) for part in _parts(merged.get("mount_roots", ""))),
        queues=tuple(dict.fromkeys((DEFAULT_QUEUE, *_parts(merged.get("queues", ""))))),
        policy=Path(merged["policy"]).absolute() if merged.get("policy", "none") != "none" else None,
        keep_logs_s=parse_retention(merged.get("keep_logs", "30d")),
        max_kept_bytes=_whole(merged.get("max_kept_bytes", str(10 << 30)), "SHOAL_MAX_KEPT_BYTES"),
        max_cache_bytes=_whole(merged.get("max_cache_bytes", str(50 << 30)), "SHOAL_MAX_CACHE_BYTES"),
        serve_host=serve_on[0],
        serve_port=serve_on[1],
        data_plane=parse_data_plane(merged.get("data_plane", DATA_PLANES[0])),
        serve_processes=_whole(merged.get("serve_processes", "1"), "SHOAL_SERVE_PROCESSES"),
        shared=Path(merged["shared"]).absolute() if merged.get("shared", "none") != "none" else None,
        anchor_copy=(
            Path(merged["anchor_copy"]).absolute() if merged.get("anchor_copy", "none") != "none" else None
        ),
        engine=merged.get("engine", "local"),
        nodes_host=nodes_on[0],
        nodes_port=nodes_on[1],
        nodes_urls=tuple(_parts(merged.get("nodes_urls", ""))),
        limits=ServerLimits(**limits),
    )


def parse_listen(text: str) -> tuple[str, int]:
    """Parse `HOST:PORT`, `:PORT`, `[::1]:PORT` or `PORT`."""
    match = re.fullmatch(r"(?:(?:\[([0-9a-fA-F:]+)\]|([^:\[\]]*)):)?(\d{1,5})", text)
    if not match or int(match[3]) > 65535:
        raise SpecError(
            f"cannot listen on `{text}`: not HOST:PORT with a port up to 65535",
            hint="write for example `--listen 127.0.0.1:7462`",
        )
    return match[1] or match[2] or "127.0.0.1", int(match[3])


def parse_data_plane(text: str) -> str:
    if text not in DATA_PLANES:
        raise SpecError(
            f"there is no data plane `{text}`; there are {' and '.join(f'`{one}`' for one in DATA_PLANES)}",
            hint="write `--data-plane haproxy`",
        )
    return text


def parse_retention(text: str) -> float:
    """Parse `30d` or `12h` into seconds."""
    match = re.fullmatch(r"(\d{1,6})([dh])", text)
    if not match or int(match[1]) == 0:
        raise SpecError(
            f"logs cannot be kept for `{text}`: not a number of days or hours", hint="write `--keep-logs 30d`"
        )
    return int(match[1]) * (86400.0 if match[2] == "d" else 3600.0)


def parse_demo(text: str) -> DemoNodes | None:
    """Parse `16x8`. `none` removes the simulated nodes."""
    if text == "none":
        return None
    match = re.fullmatch(r"(\d{1,9})x(\d{1,9})", text)
    if not match or not 1 <= int(match[1]) <= MAX_DEMO_NODES or int(match[2]) > MAX_DEMO_GPUS:
        raise SpecError(
            f"demo nodes `{text}` are not NODESxGPUS, 1 to {MAX_DEMO_NODES} of up to {MAX_DEMO_GPUS} GPUs",
            hint="write for example `--demo 16x8`",
        )
    return DemoNodes(num_nodes=int(match[1]), gpus_per_node=int(match[2]))


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _whole(text: str, name: str) -> int:
    if not re.fullmatch(r"\d{1,18}", text):
        raise SpecError(f"{name} is `{text}`, not a whole number", hint=f"unset it: `unset {name}`")
    return int(text)


def _problems(settings: Settings) -> list[str]:
    problems = []
    if (settings.tls_cert is None) != (settings.tls_key is None):
        problems.append("TLS needs both files: give `--tls-cert` and `--tls-key`")
    hosts = (settings.host, settings.serve_host)
    for host in dict.fromkeys(one for one in hosts if one not in LOOPBACK):
        if settings.tls_cert is not None or settings.is_behind_proxy:
            break
        problems.append(
            f"refusing to listen on {host} without TLS: give `--tls-cert` and `--tls-key`, "
            "or `--behind-proxy` where a proxy on the way does TLS"
        )
    if not 1 <= settings.serve_processes <= MAX_SERVE_PROCESSES:
        problems.append(f"{settings.serve_processes} data plane processes are not 1 to {MAX_SERVE_PROCESSES}")
    if settings.nodes_host in EVERYWHERE:
        problems.append(
            f"nodes cannot find a control plane at {settings.nodes_host}: give the address they reach it by, "
            "such as `SHOAL_NODES_ON=10.0.0.1:7464`"
        )
    problems += [
        f"`{url}` is no address for nodes: write https://HOST:PORT"
        for url in settings.nodes_urls
        if not re.fullmatch(r"https://(?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}", url)
    ]
    if settings.database_url and not settings.database_url.startswith(("sqlite:///", "postgresql")):
        scheme = settings.database_url.split(":", 1)[0]
        problems.append(f"database scheme `{scheme}` is not `sqlite:///PATH` or `postgresql://...`")
    if settings.shared is not None:
        problems += _sharing_problems(settings, settings.shared)
    problems += [
        f"queue `{name}` is not a name of up to {MAX_QUEUE_NAME} letters, digits and `._-`"
        for name in settings.queues
        if not QUEUE_NAME.fullmatch(name)
    ]
    problems += [
        f"mount root `{root}` is not an absolute path"
        for root in settings.mount_roots
        if not root.is_absolute()
    ]
    return problems


def _sharing_problems(settings: Settings, shared: Path) -> list[str]:
    problems = []
    if not settings.database_url.startswith("postgresql"):
        kind = settings.database_url.split(":", 1)[0] or "sqlite"
        problems.append(
            f"`--shared {shared}` is for several control planes on one PostgreSQL, and the database is "
            f"`{kind}`: give `--database postgresql://...`"
        )
    if shared == settings.home:
        problems.append(f"`--shared {shared}` is this control plane's own SHOAL_HOME: give another directory")
    if settings.host in EVERYWHERE:
        problems.append(
            f"other control planes cannot name {settings.host} to anybody: give the address that this one is "
            "reached by, such as `--listen 10.0.0.5:7462`"
        )
    return problems
