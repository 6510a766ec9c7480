"""What one control plane is told before it starts: from flags, `SHOAL_*` variables and defaults.

Checked once, here: a `Settings` that exists is safe to start. It opens nothing and reads no file.
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
"""What can be set, as text, by a flag of `shoal up` or a variable `SHOAL_...`."""
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
    """What one request, one upload or one caller may cost this server."""

    max_body_bytes: int = 4 << 20
    max_archive_bytes: int = 256 << 20
    max_archive_files: int = 20_000
    max_unpacked_bytes: int = 4 << 30
    max_project_archive_bytes: int = 10 << 30
    """All snapshots of one project that are kept or on their way."""
    max_streams: int = 1000
    max_streams_per_actor: int = 100
    max_tokens_per_user: int = 100
    """That are good: neither revoked nor expired."""
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
    """Names this server answers to beside its own address and `localhost`."""
    mount_roots: tuple[Path, ...] = ()
    """Jobs may mount these directories and what is below them; nothing else."""
    queues: tuple[str, ...] = (DEFAULT_QUEUE,)
    """Where jobs may wait: each keeps nodes for its own first job, so nobody may make one up."""
    policy: Path | None = None
    """A file with what the scheduler does otherwise than by default."""
    keep_logs_s: float = 30 * 86400.0
    """Logs and checkpoints of what ended longer ago are removed."""
    max_kept_bytes: int = 10 << 30
    """Logs of ended attempts beyond this are removed, oldest first."""
    max_cache_bytes: int = 50 << 30
    """Of one project's caches on one node; 0: jobs have none that outlive an attempt."""
    serve_host: str = "127.0.0.1"
    serve_port: int = DEFAULT_SERVE_PORT
    """Where services are called; another port where this one is taken."""
    data_plane: str = "embedded"
    """Which one of `DATA_PLANES` serves them."""
    serve_processes: int = 1
    """Of the data plane, on that port."""
    shared: Path | None = None
    """Where several control planes on one database keep what is not in it. None: there is one, in `home`."""
    anchor_copy: Path | None = None
    """A directory where the end of the event log is remembered, too. None: in the home alone."""
    engine: str = "local"
    """Where work runs: a name of `engines/registry.py`."""
    nodes_host: str = ""
    """Where supervisors on other machines find this control plane, over TLS by the home's own authority.
    Empty: nowhere, since none are on other machines."""
    nodes_port: int = 0
    nodes_urls: tuple[str, ...] = ()
    """All addresses by which they find the cluster's control planes, where it is not that one alone."""
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
        """Where a client on this machine finds it."""
        scheme = "https" if self.tls_cert else "http"
        host = "localhost" if self.host in EVERYWHERE else self.host
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def reach(self) -> tuple[str, ...]:
        """Where supervisors on other machines ask, in turn; nothing where there are none."""
        if self.nodes_urls or not self.nodes_host:
            return self.nodes_urls
        return (self._nodes_url,)

    @property
    def has_other_machines(self) -> bool:
        """Whether supervisors are on other machines, and find this control plane by its address for nodes."""
        return self.engine != "local" and bool(self.reach)

    @property
    def url_for_supervisors(self) -> str:
        """Where supervisors find this control plane, of all that the cluster may have."""
        if not self.has_other_machines:
            return self.url
        return self._nodes_url if self.nodes_host else self.reach[0]

    @property
    def _nodes_url(self) -> str:
        host = self.nodes_host
        return f"https://{f'[{host}]' if ':' in host else host}:{self.nodes_port}"

    @property
    def server_file(self) -> Path:
        return self.home / "server.json"

    @property
    def state_dir(self) -> Path:
        """Keys, archives, checkpoints and the spool: what whoever leads must find."""
        return self.shared or self.home

    @property
    def is_bound_to_machine(self) -> bool:
        """Whether jobs run on the machine of the control plane, and no other one reads its home."""
        return self.engine == "local" and self.shared is None

    @property
    def leader_file(self) -> Path:
        """Where whoever leads says where it listens, for those that the spool is for."""
        return self.shared / "leader.json" if self.shared else self.server_file

    @property
    def log_file(self) -> Path:
        return self.home / "logs" / "control.log"


def merge_options(
    flags: Mapping[str, str | None],
    env: Mapping[str, str] = os.environ,
    remembered: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The options as text: flags that are not None before `SHOAL_*` variables before what was remembered."""
    told = {name: str(text) for name, text in (remembered or {}).items() if name in OPTIONS}
    told |= {name: env[variable] for name in OPTIONS if env.get(variable := f"SHOAL_{name.upper()}")}
    return told | {name: text for name, text in flags.items() if text is not None}


def load_settings(
    options: Mapping[str, str | None] | None = None, env: Mapping[str, str] = os.environ
) -> Settings:
    """Options as text, `SHOAL_*` variables for what they leave out, else the defaults.

    Raises `SpecError` with the value seen and what would be right.
    """
    told = merge_options(options or {}, env)
    limits = {
        f.name: _whole(env[name], name)
        for f in fields(ServerLimits)
        if env.get(name := f"SHOAL_{f.name.upper()}")
    }
    host, port = parse_listen(told["listen"]) if "listen" in told else ("127.0.0.1", DEFAULT_PORT)
    serve_on = parse_listen(told["serve_on"]) if "serve_on" in told else ("127.0.0.1", DEFAULT_SERVE_PORT)
    nodes_on = parse_listen(told["nodes_on"]) if told.get("nodes_on", "none") != "none" else ("", 0)
    return Settings(
        home=home_from_env(env),
        host=host,
        port=port,
        database_url=told.get("database_url", ""),
        demo=parse_demo(told.get("demo", "none")),
        tls_cert=Path(told["tls_cert"]).absolute() if told.get("tls_cert") else None,
        tls_key=Path(told["tls_key"]).absolute() if told.get("tls_key") else None,
        is_behind_proxy=told.get("behind_proxy", "").lower() in ("1", "true", "yes", "on"),
        allowed_hosts=tuple(_parts(told.get("allowed_hosts", ""))),
        mount_roots=tuple(Path(part) for part in _parts(told.get("mount_roots", ""))),
        queues=tuple(dict.fromkeys((DEFAULT_QUEUE, *_parts(told.get("queues", ""))))),
        policy=Path(told["policy"]).absolute() if told.get("policy", "none") != "none" else None,
        keep_logs_s=parse_keep(told.get("keep_logs", "30d")),
        max_kept_bytes=_whole(told.get("max_kept_bytes", str(10 << 30)), "SHOAL_MAX_KEPT_BYTES"),
        max_cache_bytes=_whole(told.get("max_cache_bytes", str(50 << 30)), "SHOAL_MAX_CACHE_BYTES"),
        serve_host=serve_on[0],
        serve_port=serve_on[1],
        data_plane=parse_data_plane(told.get("data_plane", DATA_PLANES[0])),
        serve_processes=_whole(told.get("serve_processes", "1"), "SHOAL_SERVE_PROCESSES"),
        shared=Path(told["shared"]).absolute() if told.get("shared", "none") != "none" else None,
        anchor_copy=(
            Path(told["anchor_copy"]).absolute() if told.get("anchor_copy", "none") != "none" else None
        ),
        engine=told.get("engine", "local"),
        nodes_host=nodes_on[0],
        nodes_port=nodes_on[1],
        nodes_urls=tuple(_parts(told.get("nodes_urls", ""))),
        limits=ServerLimits(**limits),
    )


def parse_listen(text: str) -> tuple[str, int]:
    """`HOST:PORT`, `:PORT`, `[::1]:PORT` or `PORT`."""
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


def parse_keep(text: str) -> float:
    """`30d` or `12h`, in seconds."""
    match = re.fullmatch(r"(\d{1,6})([dh])", text)
    if not match or int(match[1]) == 0:
        raise SpecError(
            f"logs cannot be kept for `{text}`: not a number of days or hours", hint="write `--keep-logs 30d`"
        )
    return int(match[1]) * (86400.0 if match[2] == "d" else 3600.0)


def parse_demo(text: str) -> DemoNodes | None:
    """`16x8`; `none` takes them away again."""
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
    found = []
    if (settings.tls_cert is None) != (settings.tls_key is None):
        found.append("TLS needs both files: give `--tls-cert` and `--tls-key`")
    hosts = (settings.host, settings.serve_host)
    for host in dict.fromkeys(one for one in hosts if one not in LOOPBACK):
        if settings.tls_cert is not None or settings.is_behind_proxy:
            break
        found.append(
            f"refusing to listen on {host} without TLS: give `--tls-cert` and `--tls-key`, "
            "or `--behind-proxy` where a proxy on the way does TLS"
        )
    if not 1 <= settings.serve_processes <= MAX_SERVE_PROCESSES:
        found.append(f"{settings.serve_processes} data plane processes are not 1 to {MAX_SERVE_PROCESSES}")
    if settings.nodes_host in EVERYWHERE:
        found.append(
            f"nodes cannot find a control plane at {settings.nodes_host}: give the address they reach it by, "
            "such as `SHOAL_NODES_ON=10.0.0.1:7464`"
        )
    found += [
        f"`{url}` is no address for nodes: write https://HOST:PORT"
        for url in settings.nodes_urls
        if not re.fullmatch(r"https://(?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}", url)
    ]
    if settings.database_url and not settings.database_url.startswith(("sqlite:///", "postgresql")):
        scheme = settings.database_url.split(":", 1)[0]
        found.append(f"database scheme `{scheme}` is not `sqlite:///PATH` or `postgresql://...`")
    if settings.shared is not None:
        found += _problems_of_sharing(settings, settings.shared)
    found += [
        f"queue `{name}` is not a name of up to {MAX_QUEUE_NAME} letters, digits and `._-`"
        for name in settings.queues
        if not QUEUE_NAME.fullmatch(name)
    ]
    found += [
        f"mount root `{root}` is not an absolute path"
        for root in settings.mount_roots
        if not root.is_absolute()
    ]
    return found


def _problems_of_sharing(settings: Settings, shared: Path) -> list[str]:
    found = []
    if not settings.database_url.startswith("postgresql"):
        kind = settings.database_url.split(":", 1)[0] or "sqlite"
        found.append(
            f"`--shared {shared}` is for several control planes on one PostgreSQL, and the database is "
            f"`{kind}`: give `--database postgresql://...`"
        )
    if shared == settings.home:
        found.append(f"`--shared {shared}` is this control plane's own SHOAL_HOME: give another directory")
    if settings.host in EVERYWHERE:
        found.append(
            f"other control planes cannot name {settings.host} to anybody: give the address that this one is "
            "reached by, such as `--listen 10.0.0.5:7462`"
        )
    return found
