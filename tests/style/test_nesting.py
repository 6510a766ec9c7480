"""No text from elsewhere ends a process by its nesting: msgspec raises `RecursionError`, which is none of its
own errors, also for a field that the type does not have.
"""

from __future__ import annotations

from tests.style.nesting import unguarded_parsers
from tests.style.tree import PACKAGE, modules

ALLOWED: dict[str, frozenset[tuple[str, str]]] = {
    "what the store, the home or a process of ours holds, which nobody else writes": frozenset(
        {
            ("api/views/render.py", "render_detail"),
            ("api/views/services.py", "render_service_detail"),
            ("control/commands/arrays.py", "_record_batch"),
            ("control/commands/arrays.py", "_stop_batch"),
            ("control/commands/audit.py", "_read"),
            ("control/commands/drills.py", "_drill"),
            ("control/commands/drills.py", "_result"),
            ("control/record.py", "run_idempotent"),
            ("control/loops/project_usage.py", "recall_usage"),
            ("engines/home_records.py", "read_cluster"),
            ("engines/remote/connection.py", "load_connection"),
            ("engines/remote/mailbox.py", "_load_assignment"),
            ("engines/ray/agent.py", "Agent._launch"),
            ("engines/ray/agent.py", "_record"),
            ("engines/ray/bridge.py", "serve"),
            ("engines/ray/client.py", "_BridgeProcess._read"),
            ("engines/ray/head.py", "RayHead._read"),
            ("runtime/lease/addresses.py", "ControlPlaneAddresses._read_file"),
            ("runtime/confine/sandbox.py", "Sandbox.wait_ready"),
            ("runtime/supervisor/entry.py", "_read_credentials"),
            ("runtime/agent/node_agent.py", "main"),
            ("runtime/replica/sidecar_process.py", "main"),
            ("runtime/standby/process.py", "StandbySupervisor._read_request"),
            ("runtime/standby/process.py", "main"),
            ("serving/leader_client.py", "LeaderClient._connect"),
        }
    ),
    "a text of a few hundred bytes, or of a type that has no inside": frozenset(
        {
            ("api/call.py", "_text"),
            ("engines/slurm/rest_request.py", "parse_claims"),
        }
    ),
    "what a program of this machine says to root": frozenset(
        {("runtime/confine/firewall.py", "closed_uids")}
    ),
    "whose caller catches it": frozenset({("serving/feed.py", "TableFeed.take")}),
}


def test_parser_of_what_others_write_expects_any_nesting() -> None:
    allowed = {place for places in ALLOWED.values() for place in places}
    found = unguarded_parsers(modules(PACKAGE))
    assert found - allowed == set()
    assert allowed - found == set(), "no longer there"
