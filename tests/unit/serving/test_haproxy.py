"""Tables for HAProxy: what is refused, which commands a running HAProxy gets, and what its counters mean."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.serving.haproxy import runtime_api
from shoal.serving.haproxy.backends import server_lines
from shoal.serving.haproxy.plane import HaproxyPlane
from shoal.serving.haproxy.render import HaproxyConfig, HaproxySettings, render
from shoal.serving.haproxy.runtime_api import parse_processes
from shoal.serving.haproxy.statistics import StatTotals, parse_stat
from shoal.serving.haproxy.validation import (
    ignored_settings,
    resolve_addresses,
    supported_table,
    unsupported_settings,
)
from shoal.serving.table import (
    AllowedCaller,
    Balance,
    CallerLimits,
    ReplicaConfig,
    ServiceConfig,
    ServingTable,
)

PLACE = HaproxySettings(listener=3)
CALLER = AllowedCaller(digest="0" * 64, name="ana", project="p")


def replica(name: str = "a", **fields: Any) -> ReplicaConfig:
    return ReplicaConfig(**{"replica_id": name, "address": "127.0.0.1:80", "release": 1, **fields})


def rendered(*replicas: ReplicaConfig, **fields: Any) -> HaproxyConfig:
    defaults = {"project": "p", "name": "s", "replicas": replicas, "callers": (CALLER,)}
    return render(ServingTable(version=1, services=(ServiceConfig(**{**defaults, **fields}),)), PLACE)


BREAKS_OUT = [
    "a\n    server evil 6.6.6.6:80",
    "a b",
    "a'b",
    'a"b',
    "a#b",
    "a\\",
    "a{b}",
    "%[env(PATH)]",
    "${HOME}",
    "a;b",
    "",
]


FIELDS = ["project", "name", "hosts", "affinity", "check", "replica_id", "secret", "address"]
MAY_BE_EMPTY = {"check", "secret"}


@pytest.mark.parametrize(
    "field,hostile",
    [(field, word) for field in FIELDS for word in BREAKS_OUT if word or field not in MAY_BE_EMPTY],
)
def test_value_with_a_meaning_to_haproxy_is_refused(field: str, hostile: str) -> None:
    fields: dict[str, Any] = {}
    only_replica = replica()
    match field:
        case "hosts":
            fields["hosts"] = (hostile,)
        case "affinity":
            fields["affinity"] = f"header:{hostile}"
        case "check":
            fields["check"] = f"/{hostile}"
        case "replica_id" | "secret":
            only_replica = replica(**{field: hostile})
        case "address":
            only_replica = replica(address=f"{hostile}:80")
        case _:
            fields[field] = hostile
    with pytest.raises(ValueError, match="cannot be served") as refused:
        rendered(only_replica, **fields)
    if field == "secret":
        assert hostile not in str(refused.value), "a secret is not for logs"


@given(name=st.text(max_size=20), caller=st.text(max_size=20), host=st.text(max_size=20))
def test_names_cannot_add_lines_to_the_configuration(name: str, caller: str, host: str) -> None:
    plain = rendered(replica(), hosts=("h",))
    renamed = msgspec.structs.replace(CALLER, name=caller)
    try:
        config = rendered(replica(), name=name, callers=(renamed,), hosts=(host,))
    except ValueError:
        return
    assert config.config.count("\n") == plain.config.count("\n")
    assert [text.count("\n") for text in config.routes.values()] == [2]
    for value in config.callers.values():
        assert value.isascii()
        assert value.isprintable()


@pytest.mark.parametrize("hostile", ["6\nadd server", "g" * 64, "AB" * 32])
def test_malformed_digest_is_refused(hostile: str) -> None:
    with pytest.raises(ValueError, match="digest"):
        rendered(callers=(msgspec.structs.replace(CALLER, digest=hostile),))


def test_callers_name_cannot_begin_another_command() -> None:
    before = rendered()
    after = rendered(
        callers=(CALLER, AllowedCaller(digest="1" * 64, name="x; shutdown sessions\\", project="p"))
    )
    commands = list(runtime_api.caller_commands(before.callers, after.callers))
    assert commands[-1] == f"add map callers.map {'1' * 64}@p:s x\\;\\ shutdown\\ sessions\\\\"


def test_host_of_two_services_is_refused() -> None:
    both = [ServiceConfig(project="p", name=name, hosts=("Same.example",)) for name in ("a", "b")]
    with pytest.raises(ValueError, match="means both"):
        render(ServingTable(version=1, services=tuple(both)), PLACE)


def test_service_that_haproxy_does_not_support_is_left_out_and_the_others_are_served() -> None:
    table = ServingTable(
        version=1,
        services=(
            ServiceConfig(project="p", name="good", hosts=("a.example",)),
            ServiceConfig(project="p", name="s", check="/ready!"),
        ),
    )
    kept, problems = supported_table(table)
    assert [service.name for service in kept.services] == ["good"]
    assert any("/ready!" in sentence for sentence in problems)
    twice = (
        ServiceConfig(project="p", name="elder", hosts=("a.example",)),
        ServiceConfig(project="p", name="younger", hosts=("A.example", "b")),
    )
    kept, problems = supported_table(ServingTable(version=1, services=twice))
    assert [service.hosts for service in kept.services] == [("a.example",), ("b",)]
    assert unsupported_settings(kept) == []


def test_two_replicas_with_the_same_secret_are_refused() -> None:
    with pytest.raises(ValueError, match="one secret"):
        rendered(replica("a", secret="x"), replica("b", secret="x"))


@pytest.mark.parametrize(
    "fields",
    [
        {"hosts": ("x",)},
        {"limits": CallerLimits(rps=1)},
        {"timeout_s": 7.0},
        {"retries": 0},
        {"is_public": True},
        {"cap": 3},
        {"shares": {1: 0.5, 2: 0.5}},
        {"name": "other"},
    ],
)
def test_anything_but_servers_and_callers_needs_a_reload(fields: dict[str, Any]) -> None:
    assert runtime_api.needs_reload(rendered(replica()), rendered(replica(), **fields), ())


def test_servers_and_callers_change_while_it_runs() -> None:
    before = rendered(replica("a"), replica("b"), replica("c"))
    draining, new = replica("b", is_draining=True), replica("d", address="127.0.0.1:81")
    after = rendered(replica("a"), draining, new, callers=())
    assert not runtime_api.needs_reload(before, after, ())
    assert list(runtime_api.weight_commands(before, after)) == ["set server p:s/b weight 0"]
    assert runtime_api.removed_servers(before, after) == ["p:s/c"]
    add, *enable = runtime_api.add_commands(before, after)
    assert add.startswith("add server p:s/d 127.0.0.1:81 check ")
    assert add.endswith(" maxconn 64 weight 100")
    assert enable == ["enable health p:s/d", "enable server p:s/d"]
    assert set(runtime_api.caller_commands(before.callers, after.callers)) == {
        f"del map callers.map {CALLER.digest}",
        f"del map callers.map {CALLER.digest}@p:s",
    }


def test_server_with_a_new_address_or_still_leaving_needs_a_reload() -> None:
    before, moved = rendered(replica("a")), rendered(replica("a", address="127.0.0.1:81"))
    assert runtime_api.needs_reload(before, moved, ())
    assert runtime_api.needs_reload(rendered(), before, {"p:s/a"})
    assert not runtime_api.needs_reload(rendered(replica("b")), rendered(replica("b"), replica("a")), ())


def test_host_names_are_resolved_and_unknown_ones_left_out() -> None:
    named = ServiceConfig(
        project="p", name="s", replicas=(replica("a", address="localhost:80"), replica("b"))
    )
    lost = ServiceConfig(project="p", name="t", replicas=(replica("c", address="no.such.host.invalid:80"),))
    seen = resolve_addresses(ServingTable(version=1, services=(named, lost)))
    assert seen.services[0].replicas[0].address in {"127.0.0.1:80", "[::1]:80"}
    assert seen.services[0].replicas[1] == replica("b")
    assert seen.services[1].replicas == ()


@pytest.mark.parametrize("address", ["unix:/run/a.sock", "broker:/run/a.sock"])
def test_replica_on_a_unix_socket_is_left_out_because_haproxy_would_follow_links(address: str) -> None:
    there = ServiceConfig(project="p", name="s", replicas=(replica("a", address=address), replica("b")))
    [seen] = resolve_addresses(ServingTable(version=1, services=(there,))).services
    assert seen.replicas == (replica("b"),)
    with pytest.raises(ValueError, match="address"):
        rendered(replica("a", address=address))


def weights(*replicas: ReplicaConfig, **fields: Any) -> list[int]:
    return [
        line.weight
        for line in server_lines(ServiceConfig(project="p", name="s", replicas=replicas, **fields))
    ]


def test_weights_are_whole_numbers_that_leave_room_for_a_tenth() -> None:
    assert weights(replica("a"), replica("b", weight=0.1)) == [100, 10]
    assert weights(replica("a", weight=8.0), replica("b", weight=1.0)) == [256, 32]
    assert weights(replica("a"), replica("b", is_draining=True)) == [100, 0]


def test_traffic_share_of_a_release_is_divided_among_its_replicas() -> None:
    old, new = [replica("a"), replica("b"), replica("c")], replica("d", release=2)
    result = weights(*old, new, shares={1: 0.9, 2: 0.1})
    assert sum(result[:3]) == 9 * result[3]
    assert weights(*old, shares={1: 0.5, 2: 0.5})[0] > 0
    assert weights(old[0], new, shares={1: 1.0, 2: 0.0})[1] == 0


def test_settings_that_haproxy_ignores_are_reported() -> None:
    assert ignored_settings(ServiceConfig(project="p", name="s", replicas=(replica(),))) == []
    assert len(ignored_settings(ServiceConfig(project="p", name="s", balance=Balance.TOKENS))) == 2


@pytest.mark.parametrize("code", [None, 0])
def test_table_that_a_running_haproxy_did_not_receive_is_not_taken(tmp_path: Path, code: int | None) -> None:
    """If HAProxy has died, the next one reads the files that were written."""
    kept: list[HaproxyConfig] = []
    plane = HaproxyPlane(
        cast("Any", SimpleNamespace(folder=tmp_path, settings=PLACE, check=lambda _: None, write=kept.append))
    )
    plane._process = cast("Any", SimpleNamespace(returncode=code))
    before, table = plane._rendering, ServingTable(version=7, epoch="e")
    if code is None:
        for _ in range(2):  # its socket does not exist
            with pytest.raises(OSError):
                plane.swap(table)
        assert (plane.version, plane.epoch, plane._rendering) == (0, "", before)
    else:
        assert plane.swap(table)
        assert (plane.version, plane.epoch, plane._rendering) == (7, "e", kept[-1])


def test_current_and_old_workers_are_distinguished() -> None:
    text = """#<PID>          <type>          <reloads>       <uptime>        <version>
17946           master          2 [failed: 0]   0d00h00m01s     2.6.12-1+deb12u4
# workers
17950           worker          0               0d00h00m01s     2.6.12-1+deb12u4
# old workers
17949           worker          1               0d00h00m09s     2.6.12-1+deb12u4
17948           worker          2               0d00h00m10s     2.6.12-1+deb12u4
# programs
"""
    seen = parse_processes(text)
    assert (seen.current, seen.old) == ((17950,), (17949, 17948))


HEAD = "# pxname,svname,qcur,scur,status,hrsp_1xx,hrsp_2xx,hrsp_3xx,hrsp_4xx,hrsp_5xx,hrsp_other,eresp"


def stat(*lines: str) -> str:
    return "\n".join([HEAD, "services,FRONTEND,,9,OPEN,0,9,0,0,0,0,0", *lines, ""])


def test_counters_outlive_workers_and_servers() -> None:
    replicas = {"p:s/x": replica("a"), "p:s/y": replica("b", release=2)}
    sums = StatTotals()
    lines = (
        "p:s,x,0,2,UP,0,9,0,1,2,0,1",
        "p:s,y,0,1,DOWN 1/2,0,1,0,0,0,0,0",
        "p:s,BACKEND,4,3,UP,0,11,0,1,3,0,1",
    )
    first = stat(*lines)
    sums.take({1: parse_stat(first)}, replicas)
    reloaded = stat("p:s,x,0,1,UP,0,5,0,0,1,0,0", "p:s,BACKEND,0,1,UP,0,5,0,0,1,0,0")
    sums.take({1: parse_stat(first), 2: parse_stat(reloaded)}, replicas)
    both = sums.report("prc", 7, replicas)
    assert {c.release: (c.in_flight, c.queued, c.requests, c.errors) for c in both.counts} == {
        0: (0, 4, 0, 0),
        1: (3, 0, 19, 4),
        2: (1, 0, 1, 0),
    }
    health = {first.replica_id: (first.in_flight, first.is_ejected) for first in both.health}
    assert health == {"a": (3, False), "b": (1, True)}
    sums.take({2: parse_stat(reloaded)}, replicas)
    counts = sums.report("prc", 7, replicas).counts
    left = {count.release: (count.in_flight, count.requests) for count in counts}
    assert left == {0: (0, 0), 1: (1, 19), 2: (0, 1)}


def test_request_refused_at_zero_replicas_counts_as_waiting_so_that_one_starts() -> None:
    sums = StatTotals()
    for errors in (2, 5):
        sums.take({1: parse_stat(stat(f"p:s,BACKEND,0,0,UP,0,0,0,0,{errors},0,0"))}, {}, {"p:s"})
    assert [count.queued for count in sums.report("prc", 1, {}).counts] == [3]
