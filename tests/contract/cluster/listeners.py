"""Every TCP port that a running Shoal has opened on a cluster, anywhere, tried by who may not use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.cli.control_plane import home
from shoal.client.handles import JobHandle
from shoal.clock import SystemClock
from shoal.control.bootstrap import load_authority, load_signing_key
from shoal.control.services.state import SidecarIdentities
from shoal.home import pid_holding
from shoal.identity import bootstrap_token, job_token, proof_key
from shoal.identity.authority import make_authority
from shoal.proof import sign_for
from shoal.wire import Renewal, StatusReport, TaskPhase, TaskSpecRequest, TlsIdentity
from tests.style.tree import ROOT
from tests.support.faults.listener_probe import CLOSED, NO_TLS, TIMEOUT_S, request
from tests.support.host.cluster_lab import ClusterLab
from tests.support.host.processes import Listener, descendants, listeners
from tests.support.planes.cluster_plane import ONE_NODE, TWO_NODES, ClusterPlane
from tests.support.planes.real import until
from tests.support.serving.service import ServedApp

REFUSALS = {"401", "403", CLOSED, NO_TLS}
OPEN = ("/healthz", "/-/health")
"""Whether it is there and well: for who watches it, without a token."""
PROBED_PATHS = (
    *("/", "/v1/jobs", "/v1/nodes", "/v1/users", "/v1/self", "/v1/serving/table", "/openapi.json"),
    *("/metrics", "/-/metrics", "/hello", "/default/hello"),
)
WRONG_TOKEN = "shu_0123456789abcdef_0123456789abcdef0123456789abcdef0123456789abcdef"
ProbeRequests = list[tuple[str, bool, str]]


class ListenerContract:
    @pytest.fixture(scope="class")
    @classmethod
    def jobs(cls, plane: ClusterPlane) -> Iterator[tuple[JobHandle, JobHandle]]:
        """Somebody's on two nodes, and another's."""
        gang, other = plane.start_witness(TWO_NODES), plane.start_witness(ONE_NODE)
        yield gang, other
        plane.finish(gang)
        plane.finish(other)

    @pytest.fixture(scope="class")
    @classmethod
    def service(
        cls, plane: ClusterPlane, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[dict[str, Any]]:
        served = ServedApp(plane, tmp_path_factory.mktemp("hello"))
        served.serve()
        yield until(lambda: home.running_data_plane(plane.home) or {}, "a data plane runs")
        assert plane.command("stop", "hello").returncode == 0
        until(lambda: (told := served.table()) is not None and not told.services, "it is gone")

    def test_no_listener_answers_who_has_no_token_a_wrong_one_or_another_attempts_or_nodes(
        self, plane: ClusterPlane, jobs: tuple[JobHandle, JobHandle], service: dict[str, Any]
    ) -> None:
        found = shoal_listeners(plane, service)
        victim, other = plane.attempt(jobs[0]), plane.attempt(jobs[1])
        ports = {listener.port for listener in found[""]}
        assert len(ports) >= 3, "that of clients, that of nodes and that of services are there"
        for listener in found[""]:
            host = f"{listener.host}:{listener.port}"
            told = probe(plane.lab, "", listener, forbidden_requests(plane, victim, other, host))
            # What is not HTTP is told so, and nothing else.
            refusals = {name: REFUSALS | ({"400"} if name.startswith("noise") else set()) for name in told}
            answered = {name: said for name, said in told.items() if said not in refusals[name]}
            assert answered == {}, listener
            assert {"401", "403"} & set(told.values()), "it was spoken to in its own language"
        assert plane.attempt(jobs[0]) == victim, "nothing of it had any effect"

    def test_who_has_the_right_one_is_answered_at_the_same_ports(
        self, plane: ClusterPlane, jobs: tuple[JobHandle, JobHandle], service: dict[str, Any]
    ) -> None:
        """Else the other test would pass for requests that nobody could make."""
        victim, key = plane.attempt(jobs[0]), load_signing_key(plane.home)
        node = victim["nodes"][1]
        _, renewal, dispatch = _bodies(victim, node)
        own = proof_key(key, victim["attempt_id"], node)
        signed = sign_for(own, victim["attempt_id"], node, renewal)
        late = sign_for(own, victim["attempt_id"], node, dispatch)
        nodes = next(one for one in shoal_listeners(plane, service)[""] if one.host == plane.lab.address)
        host = f"{nodes.host}:{nodes.port}"
        made = [
            ("renew", request("POST", "/v1/supervisor/renew", host, signed, renewal, "application/json")),
            (
                "dispatch",
                request("POST", "/v1/mailbox/dispatch", host, late, dispatch, "application/octet-stream"),
            ),
            ("well", request("GET", OPEN[0], host, None, b"", "")),
        ]
        told = probe(plane.lab, "", nodes, [(name, True, raw.decode("latin-1")) for name, raw in made])
        assert told == {"renew": "200", "dispatch": "409", "well": "200"}

    def test_on_a_node_shoal_listens_at_the_porch_of_a_replica_alone(
        self, plane: ClusterPlane, jobs: tuple[JobHandle, JobHandle], service: dict[str, Any]
    ) -> None:
        until(
            lambda: any(
                is_job_process(pid) for name in plane.lab.names for pid in shoal_pids(plane.lab, name)
            ),
            "ranks run",
        )
        found = until(lambda: sidecar_listeners(plane, service), "a replica has a porch", within_s=150.0)
        [(node, [listener])] = found.items()
        assert listener.host == plane.lab.address_of(node)
        assert 19_000 <= listener.port < 20_000

    def test_a_porch_answers_data_planes_alone(
        self, plane: ClusterPlane, jobs: tuple[JobHandle, JobHandle], service: dict[str, Any]
    ) -> None:
        """Nobody without a certificate, with one of another authority, the control plane's own, or that
        of a porch, or with whatever else a token can be, gets a word.
        """
        found = until(lambda: sidecar_listeners(plane, service), "a replica has a porch", within_s=150.0)
        [(node, [porch])] = found.items()
        host = f"{porch.host}:{porch.port}"
        raw = request("GET", "/", host, None, b"", "").decode("latin-1")
        keys, own = (
            plane.home / "keys",
            SidecarIdentities(load_authority(plane.home, SystemClock()), SystemClock()),
        )
        ca = (keys / "ca.pem").read_text()
        control = ((keys / "nodes.pem").read_text(), (keys / "nodes.key").read_text())
        shown = {
            "forged": SidecarIdentities(
                make_authority("shoal cluster", time.time()), SystemClock()
            ).for_data_planes(),
            "the control plane's": TlsIdentity(certificate=control[0], key=control[1], authority=ca),
            "its own": own.for_sidecar(plane.attempt(jobs[0])["attempt_id"]),
            "another porch's": own.for_sidecar("att_000another"),
        }
        made = [(name, True, raw, msgspec.to_builtins(papers)) for name, papers in shown.items()]
        victim, other = plane.attempt(jobs[0]), plane.attempt(jobs[1])
        told = probe(plane.lab, node, porch, [*forbidden_requests(plane, victim, other, host), *made])
        assert {name: said for name, said in told.items() if said not in (CLOSED, NO_TLS)} == {}
        right = [("a data plane's", True, raw, msgspec.to_builtins(own.for_data_planes()))]
        # From here, as the data plane comes; and in time, as the server may still be on its way.
        answers = {"a data plane's": "200"}
        until(lambda: probe(plane.lab, "", porch, right) == answers, "it answers data planes", 150.0)

    def test_a_replicas_server_is_for_its_node_alone(
        self, plane: ClusterPlane, jobs: tuple[JobHandle, JobHandle], service: dict[str, Any]
    ) -> None:
        """It has no token to ask for: that is the user's own program."""

        def servers() -> list[Listener]:
            return listeners(
                [p for name in plane.lab.names for p in shoal_pids(plane.lab, name) if is_job_process(p)]
            )

        assert {one.host for one in until(servers, "a replica listens", within_s=150.0)} == {"127.0.0.1"}


def shoal_listeners(plane: ClusterPlane, service: dict[str, Any]) -> dict[str, list[Listener]]:
    """What Shoal itself listens at, by node; of this machine under an empty name."""
    pid = pid_holding(plane.home)
    assert pid is not None
    here = [*descendants(pid), *descendants(int(service["pid"]))]
    found = {"": listeners([one for one in here if not plane.lab.is_cluster_process(one)])}
    for name in plane.lab.names:
        found[name] = listeners([p for p in shoal_pids(plane.lab, name) if not is_job_process(p)])
    return found


def sidecar_listeners(plane: ClusterPlane, service: dict[str, Any]) -> dict[str, list[Listener]]:
    """What Shoal listens at on nodes, by node."""
    return {name: own for name, own in shoal_listeners(plane, service).items() if name and own}


def shoal_pids(lab: ClusterLab, node: str) -> list[int]:
    return [pid for pid in lab.pids_on(node) if not lab.is_cluster_process(pid)]


def is_job_process(pid: int) -> bool:
    """Whether it is a rank, or something that a rank started."""
    try:
        return b"SHOAL_ATTEMPT_ID=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def forbidden_requests(
    plane: ClusterPlane, victim: dict[str, Any], other: dict[str, Any], host: str
) -> ProbeRequests:
    """Requests that nobody may make: about everything with no token and a wrong one, and about one node's
    share of an attempt with what another attempt was given, or another node for the same.
    """
    key, (peer, node) = load_signing_key(plane.home), victim["nodes"]
    own = other["attempt_id"], other["nodes"][0]
    beside = victim["attempt_id"], peer
    fetch, renewal, dispatch = _bodies(victim, node)
    sent = [("GET", path, b"", "") for path in PROBED_PATHS]
    sent += [("POST", "/v1/mailbox/fetch", fetch, "application/json")]
    sent += [("POST", "/v1/mailbox/archive", fetch, "application/json")]
    sent += [("POST", "/v1/supervisor/renew", renewal, "application/json")]
    sent += [("POST", "/v1/mailbox/dispatch", dispatch, "application/octet-stream")]
    made = []
    for method, path, body, kind in sent:
        tokens: dict[str, str | None] = {"no token": None, "a wrong one": WRONG_TOKEN}
        if body:
            tokens["another attempt's bootstrap token"] = bootstrap_token(key, own[0])
            tokens["another attempt's signature"] = sign_for(proof_key(key, *own), *own, body)
            forged = sign_for(proof_key(key, *own), victim["attempt_id"], node, body)
            tokens["this one's name, signed by another"] = forged
            tokens["another attempt's job"] = job_token(key, own[0])
            tokens["its other node's signature"] = sign_for(proof_key(key, *beside), *beside, body)
            forged = sign_for(proof_key(key, *beside), victim["attempt_id"], node, body)
            tokens["this node's name, signed by its other"] = forged
            tokens["its own job's"] = job_token(key, victim["attempt_id"])
        for what, token in tokens.items():
            raw = request(method, path, host, token, body, kind)
            made += [(f"{method} {path}, {what}", is_tls, raw.decode("latin-1")) for is_tls in (False, True)]
    noise = [("noise", is_tls, "\0\1\2 nothing\r\n\r\n") for is_tls in (False, True)]
    return [(f"{name}{' over TLS' if is_tls else ''}", is_tls, raw) for name, is_tls, raw in made + noise]


def _bodies(attempt: dict[str, Any], node: str) -> tuple[bytes, bytes, bytes]:
    named = {"attempt_id": attempt["attempt_id"], "node": node}
    process = "0" * 32
    fetch = TaskSpecRequest(**named, replacement=0, process=process)
    renewal = Renewal(
        **named, epoch=attempt["epoch"], phase=TaskPhase.RUNNING, nonce="00" * 16, proof_version=3
    )
    dispatch = StatusReport(**named, epoch=attempt["epoch"], process=process)
    return msgspec.json.encode(fetch), msgspec.json.encode(renewal), msgspec.json.encode(dispatch) + b"\n"


def probe(
    lab: ClusterLab,
    node: str,
    listener: Listener,
    requests: Sequence[tuple[Any, ...]],
    timeout_s: float = TIMEOUT_S,
) -> dict[str, str]:
    """In the listener's own network: what is for loopback there is tried there."""
    hosts = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    host = hosts.get(listener.host, listener.host)
    inside = ["nsenter", f"--net=/run/netns/{lab.netns_of(node)}"] if node else []
    done = subprocess.run(
        [
            *inside,
            sys.executable,
            "-m",
            "tests.support.faults.listener_probe",
            host,
            str(listener.port),
            str(timeout_s),
        ],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}"},
    )
    assert done.returncode == 0, (listener, done.stderr)
    told: dict[str, str] = json.loads(done.stdout)
    return told
