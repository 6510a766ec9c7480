"""Tables for HAProxy: what is refused, what is said to a running one, what it counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.serving.haproxy import changes
from shoal.serving.haproxy.addresses import resolved
from shoal.serving.haproxy.backends import servers
from shoal.serving.haproxy.master import parse_processes
from shoal.serving.haproxy.plane import HaproxyPlane
from shoal.serving.haproxy.render import Place, Rendering, render
from shoal.serving.haproxy.statistics import Sums, parse_stat
from shoal.serving.haproxy.words import beyond, speakable, unspeakable
from shoal.serving.table import Balance, Caller, Limits, Replica, Service, Table

PLACE = Place(listener=3)
CALLER = Caller(digest="0" * 64, name="ana", project="p")


def replica(name: str = "a", **told: Any) -> Replica:
    return Replica(**{"replica_id": name, "address": "127.0.0.1:80", "release": 1, **told})


def rendered(*replicas: Replica, **told: Any) -> Rendering:
    known = {"project": "p", "name": "s", "replicas": replicas, "callers": (CALLER,)}
    return render(Table(version=1, services=(Service(**{**known, **told}),)), PLACE)


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
def test_word_that_means_something_to_haproxy_is_refused(field: str, hostile: str) -> None:
    told: dict[str, Any] = {}
    one = replica()
    match field:
        case "hosts":
            told["hosts"] = (hostile,)
        case "affinity":
            told["affinity"] = f"header:{hostile}"
        case "check":
            told["check"] = f"/{hostile}"
        case "replica_id" | "secret":
            one = replica(**{field: hostile})
        case "address":
            one = replica(address=f"{hostile}:80")
        case _:
            told[field] = hostile
    with pytest.raises(ValueError, match="cannot be served") as refused:
        rendered(one, **told)
    if field == "secret":
        assert hostile not in str(refused.value), "a secret is not for logs"


@given(name=st.text(max_size=20), caller=st.text(max_size=20), host=st.text(max_size=20))
def test_whatever_names_are_the_lines_stay_ours(name: str, caller: str, host: str) -> None:
    plain = rendered(replica(), hosts=("h",))
    who = msgspec.structs.replace(CALLER, name=caller)
    try:
        made = rendered(replica(), name=name, callers=(who,), hosts=(host,))
    except ValueError:
        return
    assert made.config.count("\n") == plain.config.count("\n")
    assert [text.count("\n") for text in made.routes.values()] == [2]
    for value in made.callers.values():
        assert value.isascii()
        assert value.isprintable()


@pytest.mark.parametrize("hostile", ["6\nadd server", "g" * 64, "AB" * 32])
def test_digest_that_is_none_is_refused(hostile: str) -> None:
    with pytest.raises(ValueError, match="digest"):
        rendered(callers=(msgspec.structs.replace(CALLER, digest=hostile),))


def test_callers_name_cannot_begin_another_command() -> None:
    before = rendered()
    after = rendered(callers=(CALLER, Caller(digest="1" * 64, name="x; shutdown sessions\\", project="p")))
    told = list(changes.called(before.callers, after.callers))
    assert told[-1] == f"add map callers.map {'1' * 64}@p:s x\\;\\ shutdown\\ sessions\\\\"


def test_host_that_means_two_services_is_refused() -> None:
    both = [Service(project="p", name=name, hosts=("Same.example",)) for name in ("a", "b")]
    with pytest.raises(ValueError, match="means both"):
        render(Table(version=1, services=tuple(both)), PLACE)


def test_service_that_haproxy_cannot_be_told_is_left_out_and_the_others_are_served() -> None:
    told = Table(
        version=1,
        services=(
            Service(project="p", name="good", hosts=("a.example",)),
            Service(project="p", name="s", check="/ready!"),
        ),
    )
    kept, found = speakable(told)
    assert [service.name for service in kept.services] == ["good"]
    assert any("/ready!" in sentence for sentence in found)
    twice = (
        Service(project="p", name="elder", hosts=("a.example",)),
        Service(project="p", name="younger", hosts=("A.example", "b")),
    )
    kept, found = speakable(Table(version=1, services=twice))
    assert [service.hosts for service in kept.services] == [("a.example",), ("b",)]
    assert unspeakable(kept) == []


def test_two_replicas_of_one_secret_are_refused() -> None:
    with pytest.raises(ValueError, match="one secret"):
        rendered(replica("a", secret="x"), replica("b", secret="x"))


@pytest.mark.parametrize(
    "told",
    [
        {"hosts": ("x",)},
        {"limits": Limits(rps=1)},
        {"timeout_s": 7.0},
        {"retries": 0},
        {"is_public": True},
        {"cap": 3},
        {"shares": {1: 0.5, 2: 0.5}},
        {"name": "other"},
    ],
)
def test_anything_but_servers_and_callers_needs_a_reload(told: dict[str, Any]) -> None:
    assert changes.needs_reload(rendered(replica()), rendered(replica(), **told), ())


def test_servers_and_callers_change_while_it_runs() -> None:
    before = rendered(replica("a"), replica("b"), replica("c"))
    draining, new = replica("b", is_draining=True), replica("d", address="127.0.0.1:81")
    after = rendered(replica("a"), draining, new, callers=())
    assert not changes.needs_reload(before, after, ())
    assert list(changes.weighed(before, after)) == ["set server p:s/b weight 0"]
    assert changes.removed(before, after) == ["p:s/c"]
    add, *enable = changes.added(before, after)
    assert add.startswith("add server p:s/d 127.0.0.1:81 check ")
    assert add.endswith(" maxconn 64 weight 100")
    assert enable == ["enable health p:s/d", "enable server p:s/d"]
    assert set(changes.called(before.callers, after.callers)) == {
        f"del map callers.map {CALLER.digest}",
        f"del map callers.map {CALLER.digest}@p:s",
    }


def test_server_that_moved_or_has_not_left_yet_needs_a_reload() -> None:
    one, moved = rendered(replica("a")), rendered(replica("a", address="127.0.0.1:81"))
    assert changes.needs_reload(one, moved, ())
    assert changes.needs_reload(rendered(), one, {"p:s/a"})
    assert not changes.needs_reload(rendered(replica("b")), rendered(replica("b"), replica("a")), ())


def test_names_become_addresses_and_who_has_none_is_left_out() -> None:
    known = Service(project="p", name="s", replicas=(replica("a", address="localhost:80"), replica("b")))
    lost = Service(project="p", name="t", replicas=(replica("c", address="no.such.host.invalid:80"),))
    seen = resolved(Table(version=1, services=(known, lost)))
    assert seen.services[0].replicas[0].address in {"127.0.0.1:80", "[::1]:80"}
    assert seen.services[0].replicas[1] == replica("b")
    assert seen.services[1].replicas == ()


@pytest.mark.parametrize("address", ["unix:/run/a.sock", "door:/run/a.sock"])
def test_replica_in_a_file_is_left_out_since_links_would_be_followed(address: str) -> None:
    there = Service(project="p", name="s", replicas=(replica("a", address=address), replica("b")))
    [seen] = resolved(Table(version=1, services=(there,))).services
    assert seen.replicas == (replica("b"),)
    with pytest.raises(ValueError, match="address"):
        rendered(replica("a", address=address))


def weights(*replicas: Replica, **told: Any) -> list[int]:
    return [one.weight for one in servers(Service(project="p", name="s", replicas=replicas, **told))]


def test_weights_are_whole_numbers_that_leave_room_for_a_tenth() -> None:
    assert weights(replica("a"), replica("b", weight=0.1)) == [100, 10]
    assert weights(replica("a", weight=8.0), replica("b", weight=1.0)) == [256, 32]
    assert weights(replica("a"), replica("b", is_draining=True)) == [100, 0]


def test_share_of_a_release_is_divided_among_its_replicas() -> None:
    old, new = [replica("a"), replica("b"), replica("c")], replica("d", release=2)
    told = weights(*old, new, shares={1: 0.9, 2: 0.1})
    assert sum(told[:3]) == 9 * told[3]
    assert weights(*old, shares={1: 0.5, 2: 0.5})[0] > 0
    assert weights(old[0], new, shares={1: 1.0, 2: 0.0})[1] == 0


def test_what_haproxy_does_not_do_is_said() -> None:
    assert beyond(Service(project="p", name="s", replicas=(replica(),))) == []
    assert len(beyond(Service(project="p", name="s", balance=Balance.TOKENS))) == 2


@pytest.mark.parametrize("code", [None, 0])
def test_table_that_a_living_haproxy_did_not_hear_of_is_not_taken(tmp_path: Path, code: int | None) -> None:
    """Of one that has died the next reads what was kept."""
    kept: list[Rendering] = []
    plane = HaproxyPlane(
        cast("Any", SimpleNamespace(folder=tmp_path, place=PLACE, check=lambda _: None, keep=kept.append))
    )
    plane._process = cast("Any", SimpleNamespace(returncode=code))
    before, table = plane._rendering, Table(version=7, epoch="e")
    if code is None:
        for _ in range(2):  # its socket is not there
            with pytest.raises(OSError):
                plane.swap(table)
        assert (plane.version, plane.epoch, plane._rendering) == (0, "", before)
    else:
        assert plane.swap(table)
        assert (plane.version, plane.epoch, plane._rendering) == (7, "e", kept[-1])


def test_processes_are_told_apart() -> None:
    told = """#<PID>          <type>          <reloads>       <uptime>        <version>
17946           master          2 [failed: 0]   0d00h00m01s     2.6.12-1+deb12u4
# workers
17950           worker          0               0d00h00m01s     2.6.12-1+deb12u4
# old workers
17949           worker          1               0d00h00m09s     2.6.12-1+deb12u4
17948           worker          2               0d00h00m10s     2.6.12-1+deb12u4
# programs
"""
    seen = parse_processes(told)
    assert (seen.current, seen.old) == ((17950,), (17949, 17948))


HEAD = "# pxname,svname,qcur,scur,status,hrsp_1xx,hrsp_2xx,hrsp_3xx,hrsp_4xx,hrsp_5xx,hrsp_other,eresp"


def stat(*lines: str) -> str:
    return "\n".join([HEAD, "services,FRONTEND,,9,OPEN,0,9,0,0,0,0,0", *lines, ""])


def test_counters_outlive_workers_and_servers() -> None:
    replicas = {"p:s/x": replica("a"), "p:s/y": replica("b", release=2)}
    sums = Sums()
    lines = (
        "p:s,x,0,2,UP,0,9,0,1,2,0,1",
        "p:s,y,0,1,DOWN 1/2,0,1,0,0,0,0,0",
        "p:s,BACKEND,4,3,UP,0,11,0,1,3,0,1",
    )
    one = stat(*lines)
    sums.take({1: parse_stat(one)}, replicas)
    reloaded = stat("p:s,x,0,1,UP,0,5,0,0,1,0,0", "p:s,BACKEND,0,1,UP,0,5,0,0,1,0,0")
    sums.take({1: parse_stat(one), 2: parse_stat(reloaded)}, replicas)
    both = sums.report("prc", 7, replicas)
    assert {c.release: (c.in_flight, c.queued, c.requests, c.errors) for c in both.counts} == {
        0: (0, 4, 0, 0),
        1: (3, 0, 19, 4),
        2: (1, 0, 1, 0),
    }
    health = {one.replica_id: (one.in_flight, one.is_ejected) for one in both.health}
    assert health == {"a": (3, False), "b": (1, True)}
    sums.take({2: parse_stat(reloaded)}, replicas)
    counts = sums.report("prc", 7, replicas).counts
    left = {count.release: (count.in_flight, count.requests) for count in counts}
    assert left == {0: (0, 0), 1: (1, 19), 2: (0, 1)}


def test_who_is_turned_away_at_zero_counts_as_waiting_so_that_one_is_started() -> None:
    sums = Sums()
    for errors in (2, 5):
        sums.take({1: parse_stat(stat(f"p:s,BACKEND,0,0,UP,0,0,0,0,{errors},0,0"))}, {}, {"p:s"})
    assert [count.queued for count in sums.report("prc", 1, {}).counts] == [3]
