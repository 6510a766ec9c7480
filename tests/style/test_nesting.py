"""No text from elsewhere ends a process by its nesting: msgspec raises `RecursionError`, which is none of its
own errors, also for a field that the type does not have.
"""

from __future__ import annotations

from tests.style.nesting import unguarded_parsers
from tests.style.tree import PACKAGE, modules

ALLOWED: dict[str, frozenset[tuple[str, str]]] = {
    "what the store, the home or a process of ours holds, which nobody else writes": frozenset(
        {
            ("api/render.py", "render_detail"),
            ("api/service_views.py", "render_detail"),
            ("control/arrays.py", "_make_some"),
            ("control/arrays.py", "_stop_some"),
            ("control/audit.py", "_read"),
            ("control/drills.py", "_drill"),
            ("control/drills.py", "_result"),
            ("control/once.py", "once"),
            ("control/usage.py", "recall"),
            ("engines/cluster_id.py", "read_cluster"),
            ("engines/connection.py", "load"),
            ("engines/desk.py", "_taken"),
            ("engines/ray/agent.py", "Agent._launch"),
            ("engines/ray/agent.py", "_record"),
            ("engines/ray/bridge.py", "serve"),
            ("engines/ray/client.py", "_Bridge._read"),
            ("engines/ray/head.py", "Head._read"),
            ("runtime/addresses.py", "Addresses._read_file"),
            ("runtime/confine/sandbox.py", "Sandbox.wait_ready"),
            ("runtime/entry.py", "_read_credentials"),
            ("runtime/keeper.py", "main"),
            ("runtime/porch/process.py", "main"),
            ("runtime/standby/process.py", "Standby._understood"),
            ("runtime/standby/process.py", "main"),
            ("serving/server.py", "Server._connected"),
        }
    ),
    "a text of a few hundred bytes, or of a type that has no inside": frozenset(
        {
            ("api/admission.py", "_text"),
            ("engines/slurm/rest_place.py", "claims_of"),
        }
    ),
    "what a program of this machine says to root": frozenset(
        {("runtime/confine/firewall.py", "closed_uids")}
    ),
    "whose caller catches it": frozenset({("serving/feed.py", "Feed.take")}),
}


def test_parser_of_what_others_write_expects_any_nesting() -> None:
    allowed = {place for places in ALLOWED.values() for place in places}
    found = unguarded_parsers(modules(PACKAGE))
    assert found - allowed == set()
    assert allowed - found == set(), "no longer there"
