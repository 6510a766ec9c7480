"""The bridge between Shoal and Ray: a process of the Python that has Ray, with lines of JSON on its pipes.

`client` starts it as a file. Ray's calls block, wait for minutes for a lost head, and end the process when
they give up. In this process, that costs the control plane only one reply. The first input line is the
setup; the first output line says that Ray is connected, or why not. After that, every line is a question
with a number; replies come in any order. The process ends with its standard input.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

PREFIX = "agent-"
THREADS = 16
STALE_S = 10.0
"""How long an agent may refuse connections before we assume that we are wrong: an agent that was replaced
while the head was away would be asked at its old port for ever."""
NODE_FIELDS = (
    "NodeID",
    "Alive",
    "NodeName",
    "NodeManagerAddress",
    "Resources",
    "Labels",
    "DeathReasonMessage",
)


class Bridge:
    """The connection to one Ray. Its methods block; each replies within its `within_s`, or as soon as Ray
    lets it.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        self._setup = setup
        self._module = _load(setup["agent"])
        source = open(setup["agent"], "rb").read()  # noqa: SIM115, PTH123
        self._tag = hashlib.sha256(source).hexdigest()[:8]
        self._guard = threading.Lock()
        self._agents: dict[str, Any] = {}
        self._pending_facts: dict[str, Any] = {}
        """By node: a pending question about its facts. A node that hangs gets only one."""
        self._refused_at: dict[str, float] = {}
        """By node: when its agent first refused, for agents that still refuse."""
        self._late: dict[str, Any] = {}
        """By node: a question that was not answered in time. Until it is, no call waits for that node,
        because all other nodes, and the recovery of their tasks, would wait with every observation."""

    def connect(self) -> dict[str, Any]:
        ray.init(
            address=self._setup["address"],
            namespace=self._setup["namespace"],
            log_to_driver=False,
            configure_logging=False,
            _node_ip_address=self._setup.get("node_ip") or None,
        )
        return {"ray": ray.__version__, "python": sys.version.split()[0]}

    def nodes(self, within_s: float) -> dict[str, Any]:
        """Return what Ray says of every node, and what the agents of living nodes say."""
        rows = [{name: row.get(name) for name in NODE_FIELDS} for row in ray.nodes()]
        alive = [row["NodeID"] for row in rows if row["Alive"] and row["Resources"].get("CPU")]
        with self._guard:
            self._agents = {node: agent for node, agent in self._agents.items() if node in alive}
            self._pending_facts = {node: ref for node, ref in self._pending_facts.items() if node in alive}
            self._late = {node: ref for node, ref in self._late.items() if node in alive}
        calls = {node: partial(self._request_facts, node) for node in alive}
        facts, failed = self._gather_from_prompt(calls, within_s)
        with self._guard:
            for node in (*facts, *failed):
                if node in facts or failed[node] != _LATE:
                    self._pending_facts.pop(node, None)
        return {"rows": rows, "facts": facts, "failed": failed}

    def start(self, within_s: float, starts: list[dict[str, Any]]) -> dict[str, Any]:
        """Return, by key, the process of each node agent that was started or ran, and the failures of the
        others.
        """
        calls = {
            start["key"]: partial(self._call, start["node_id"], "start", start["key"], start["task"])
            for start in starts
        }
        done, failed = self._gather(calls, within_s, {start["key"]: start["node_id"] for start in starts})
        return {"done": done, "failed": failed}

    def look(self, within_s: float, keys: dict[str, list[str]]) -> dict[str, Any]:
        """Return, by node, what its agent says of these keys."""
        calls = {node: partial(self._call, node, "look", node_keys) for node, node_keys in keys.items()}
        seen, failed = self._gather_from_prompt(calls, within_s)
        return {"seen": seen, "failed": failed}

    def end(self, within_s: float, keys: dict[str, list[str]]) -> dict[str, Any]:
        calls = {node: partial(self._call, node, "end", node_keys) for node, node_keys in keys.items()}
        _, failed = self._gather(calls, within_s)
        return {"failed": failed}

    def dismiss(self, within_s: float) -> dict[str, Any]:
        """End every Ray agent of ours. Node agents keep running."""
        names = [name for name in ray.util.list_named_actors() if name.startswith(PREFIX)]
        for name in names:
            ray.kill(ray.get_actor(name))
        return {"dismissed": len(names)}

    def _request_facts(self, node: str) -> Any:
        with self._guard:
            pending = self._pending_facts.get(node)
        if pending is None:
            pending = self._call(node, "facts")
            with self._guard:
                self._pending_facts[node] = pending
        return pending

    def _call(self, node: str, verb: str, *args: Any) -> Any:
        return getattr(self._agent(node), verb).remote(self._setup["root"], *args)

    def _agent(self, node: str) -> Any:
        """Return the agent on that node. Create it if there is none, or only one of another version of
        Shoal.
        """
        with self._guard:
            if node not in self._agents:
                name = f"{PREFIX}{self._tag}-{node}"
                self._end_others(name, node)
                self._agents[node] = (
                    ray.remote(self._module.Agent)
                    .options(
                        name=name,
                        lifetime=self._setup["lifetime"],
                        get_if_exists=True,
                        num_cpus=0,
                        max_restarts=-1,
                        max_concurrency=THREADS,
                        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                    )
                    .remote()
                )
            return self._agents[node]

    def _end_others(self, name: str, node: str) -> None:
        for other in ray.util.list_named_actors():
            if other.startswith(PREFIX) and other.endswith(f"-{node}") and other != name:
                ray.kill(ray.get_actor(other))

    def _gather_from_prompt(
        self, calls: Mapping[str, Callable[[], Any]], within_s: float
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Call by node, except nodes that still owe a reply."""
        late = {node: _LATE for node in calls if self._is_late(node)}
        prompt = {node: call for node, call in calls.items() if node not in late}
        answers, failed = self._gather(prompt, within_s)
        return answers, failed | late

    def _is_late(self, node: str) -> bool:
        with self._guard:
            owed = self._late.get(node)
        if owed is None or not ray.wait([owed], timeout=0)[0]:
            return owed is not None
        with self._guard:
            self._late.pop(node, None)
        return False

    def _gather(
        self,
        calls: Mapping[str, Callable[[], Any]],
        within_s: float,
        nodes: dict[str, str] | None = None,
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Make all calls at once. Return the replies that came in time, and the failures of the others."""
        refs, failed = {}, {}
        for key, call in calls.items():
            try:
                refs[key] = call()
            except (RayActorError, ValueError) as error:
                failed[key] = _describe_error(error)
                self._drop((nodes or {}).get(key, key))
        ready, _ = (
            ray.wait(list(refs.values()), num_returns=len(refs), timeout=within_s) if refs else ([], [])
        )
        answers = {}
        for key, ref in refs.items():
            node = (nodes or {}).get(key, key)
            if ref not in ready:
                failed[key] = _LATE
                with self._guard:
                    self._late.setdefault(node, ref)
                continue
            try:
                answers[key] = ray.get(ref)
                self._refused_at.pop(node, None)
            except RayActorError as error:
                failed[key] = _describe_error(error)
                self._drop(node)
                self._end_if_stale(node, str(error))
            except Exception as error:  # noqa: BLE001 - any error of the agent is the reply
                failed[key] = _describe_error(error)
        return answers, failed

    def _end_if_stale(self, node: str, message: str) -> None:
        """End this process. The next question starts another, which asks Ray again where the agents are."""
        if "Connection refused" not in message:
            return
        since = self._refused_at.setdefault(node, time.monotonic())
        if time.monotonic() - since > STALE_S:
            sys.stderr.write(
                f"the agent on {node} has left the address that Ray gave: the bridge ends, to ask Ray again\n"
            )
            sys.stderr.flush()
            os._exit(1)

    def _drop(self, node: str) -> None:
        """Forget an agent that is not there; the next question creates it again."""
        with self._guard:
            self._agents.pop(node, None)
            self._pending_facts.pop(node, None)
            self._late.pop(node, None)


_LATE = "its agent has not answered in time"


def _describe_error(error: BaseException) -> str:
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).strip().splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[0] if lines else ''}"[:500]


def _load(path: str) -> ModuleType:
    """Load the agent's module so that Ray sends it to nodes by value: no node needs to have it."""
    spec = importlib.util.spec_from_file_location("shoal_ray_agent", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["shoal_ray_agent"] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


def serve(lines: Iterable[str], send: Callable[[dict[str, Any]], None]) -> None:
    """Answer questions until the lines end."""
    setup = json.loads(next(iter(lines)))
    try:
        bridge = Bridge(setup)
        send({"ready": bridge.connect()})
    except BaseException as error:  # noqa: BLE001 - the client must get every error
        traceback.print_exc()
        send({"failed": f"{type(error).__name__}: {error}"})
        return
    pool = ThreadPoolExecutor(THREADS)
    for line in lines:
        pool.submit(_answer, bridge, json.loads(line), send)


def _answer(bridge: Bridge, question: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> None:
    try:
        result = getattr(bridge, question["verb"])(question["within_s"], **question["args"])
        send({"id": question["id"], "told": result})
    except Exception as error:  # noqa: BLE001 - the error is the reply
        traceback.print_exc()
        send({"id": question["id"], "error": _describe_error(error)})


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what Ray prints is no reply
    guard = threading.Lock()

    def send(message: dict[str, Any]) -> None:
        with guard:
            out.write(json.dumps(message) + "\n")
            out.flush()

    serve(iter(sys.stdin.readline, ""), send)
    os._exit(0)


if __name__ == "__main__":
    main()
