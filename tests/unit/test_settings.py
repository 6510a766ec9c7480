"""A configuration that exists is safe to start."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import SpecError
from shoal.settings import DemoNodes, load_settings, merge_options, parse_listen


def env(**more: str) -> dict[str, str]:
    return {"SHOAL_HOME": "/tmp/h", **{f"SHOAL_{name.upper()}": text for name, text in more.items()}}


def test_flags_come_before_variables_and_variables_before_what_was_remembered() -> None:
    remembered = {"demo": "1x1", "listen": ":1", "database_url": "sqlite:///a", "unknown": "x"}
    merged = merge_options({"demo": "3x3", "listen": None}, env(demo="2x2", listen=":2"), remembered)
    assert merged == {"demo": "3x3", "listen": ":2", "database_url": "sqlite:///a"}


def test_everything_has_a_default() -> None:
    settings = load_settings({}, env())
    assert settings.home == Path("/tmp/h")
    assert settings.url == "http://127.0.0.1:7462"
    assert settings.store_url == "sqlite:////tmp/h/shoal.db"
    assert settings.is_loopback


def test_every_option_is_read_from_its_variable() -> None:
    settings = load_settings(
        {},
        env(
            listen="[::1]:80", demo="16x8", database_url="postgresql+psycopg://u@h/d", behind_proxy="true",
            allowed_hosts="a.example, b.example", mount_roots="/data,/srv", max_body_bytes="1000",
            keep_logs="12h", max_kept_bytes="5000", queues="night, day,default",
        ),
    )  # fmt: skip
    assert (settings.host, settings.port, settings.url) == ("::1", 80, "http://[::1]:80")
    assert settings.demo == DemoNodes(num_nodes=16, gpus_per_node=8)
    assert settings.allowed_hosts == ("a.example", "b.example")
    assert settings.mount_roots == (Path("/data"), Path("/srv"))
    assert settings.queues == ("default", "night", "day")
    assert settings.limits.max_body_bytes == 1000
    assert (settings.keep_logs_s, settings.max_kept_bytes) == (12 * 3600.0, 5000)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "[::]"])
def test_listening_elsewhere_without_tls_or_a_proxy_is_refused(host: str) -> None:
    with pytest.raises(SpecError, match="without TLS"):
        load_settings({"listen": f"{host}:7462"}, env())
    assert load_settings({"listen": f"{host}:7462", "behind_proxy": "true"}, env()).is_behind_proxy
    tls = {"tls_cert": "/c.pem", "tls_key": "/k.pem"}
    assert load_settings({"listen": f"{host}:7462", **tls}, env()).url.startswith("https://")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tls_cert": "/c.pem"}, "both files"),
        ({"database_url": "mysql://x:secret@h/d"}, "`mysql`"),
        ({"mount_roots": "data"}, "not an absolute path"),
        ({"queues": "day,late night"}, "`late night`"),
        ({"keep_logs": "forever"}, "`forever`"),
        ({"keep_logs": "0d"}, "`0d`"),
        ({"max_kept_bytes": "10G"}, "not a whole number"),
        ({"demo": "16"}, "NODESxGPUS"),
        ({"demo": "0x8"}, "NODESxGPUS"),
        ({"demo": "99999x8"}, "NODESxGPUS"),
        ({"listen": "host"}, "not HOST:PORT"),
        ({"listen": "1.2.3.4:70000"}, "not HOST:PORT"),
    ],
)
def test_a_bad_option_is_named_with_what_would_be_right(options: dict[str, str], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        load_settings(options, env())
    assert "secret" not in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "place"),
    [("7000", ("127.0.0.1", 7000)), (":7000", ("127.0.0.1", 7000)), ("h.example:1", ("h.example", 1))],
)
def test_addresses_are_read_as_people_write_them(text: str, place: tuple[str, int]) -> None:
    assert parse_listen(text) == place


PG = "postgresql://shoal@db/shoal"


def test_what_a_successor_must_find_is_in_the_shared_directory() -> None:
    settings = load_settings({"shared": "/srv/shoal", "database_url": PG}, env())
    assert (settings.state_dir, settings.leader_file) == (Path("/srv/shoal"), Path("/srv/shoal/leader.json"))
    alone = load_settings({"shared": "none"}, env())
    assert (alone.state_dir, alone.leader_file) == (Path("/tmp/h"), Path("/tmp/h/server.json"))


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"shared": "/srv/shoal"}, "the database is `sqlite`"),
        ({"shared": "/tmp/h", "database_url": PG}, "own SHOAL_HOME"),
        ({"shared": "/srv", "database_url": PG, "listen": "0.0.0.0:1", "behind_proxy": "1"}, "name 0.0.0.0"),
    ],
)
def test_sharing_that_could_not_work_is_refused(changes: dict[str, str], because: str) -> None:
    with pytest.raises(SpecError, match=because):
        load_settings(changes, env())


def test_supervisors_on_other_machines_get_the_address_for_nodes() -> None:
    local = load_settings({"nodes_on": "10.0.0.1:7464"}, env())
    assert local.url_for_supervisors == local.url
    other = load_settings({"nodes_on": "10.0.0.1:7464", "engine": "slurm"}, env())
    assert other.url_for_supervisors == "https://10.0.0.1:7464"
