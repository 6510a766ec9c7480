"""Between Shoal and Ray: a process of the Python that has Ray, with lines of JSON on its pipes.

Started by `client` as a file. Ray's calls block, wait for a lost head for minutes and end the process when
they give up: here that costs the control plane an answer. The first line in is the set-up, the first line out
says who is there, or why nobody is. Then every line is a question with a number; answers come in any order.
It ends with its standard input.
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
"""How long an agent may refuse before we are taken for who is wrong: one that was replaced while the head was
away is asked at its old port for ever."""
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
    """Connected to one Ray. Its verbs block; each answers within its `within_s`, or as Ray lets it."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._setup = setup
        self._module = _load(setup["agent"])
        source = open(setup["agent"], "rb").read()  # noqa: SIM115, PTH123
        self._tag = hashlib.sha256(source).hexdigest()[:8]
        self._guard = threading.Lock()
        self._agents: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}
        """By node: a question about its facts that is not answered yet. A node that hangs gets one."""
        self._refused_at: dict[str, float] = {}
        """By node: when its agent first refused, of those that do so still."""
        self._late: dict[str, Any] = {}
        """By node: a question that was not answered in time. Until it is, nobody is kept waiting for that
        node: all others, and the recovery of what runs there, would wait with them at every look.
        """

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
        """What Ray says of every node, and what the agents of those say that live."""
        rows = [{name: row.get(name) for name in NODE_FIELDS} for row in ray.nodes()]
        alive = [row["NodeID"] for row in rows if row["Alive"] and row["Resources"].get("CPU")]
        with self._guard:
            self._agents = {node: agent for node, agent in self._agents.items() if node in alive}
            self._asked = {node: ref for node, ref in self._asked.items() if node in alive}
            self._late = {node: ref for node, ref in self._late.items() if node in alive}
        asked = {node: partial(self._ask_facts, node) for node in alive}
        facts, failed = self._gather_from_prompt(asked, within_s)
        with self._guard:
            for node in (*facts, *failed):
                if node in facts or failed[node] != _LATE:
                    self._asked.pop(node, None)
        return {"rows": rows, "facts": facts, "failed": failed}

    def start(self, within_s: float, starts: list[dict[str, Any]]) -> dict[str, Any]:
        """By key of those that were started, or ran: the keeper's process; and what became of the others."""
        calls = {
            one["key"]: partial(self._call, one["node_id"], "start", one["key"], one["task"])
            for one in starts
        }
        done, failed = self._gather(calls, within_s, {one["key"]: one["node_id"] for one in starts})
        return {"done": done, "failed": failed}

    def look(self, within_s: float, keys: dict[str, list[str]]) -> dict[str, Any]:
        """By node: what its agent says of these keys."""
        calls = {node: partial(self._call, node, "look", own) for node, own in keys.items()}
        seen, failed = self._gather_from_prompt(calls, within_s)
        return {"seen": seen, "failed": failed}

    def end(self, within_s: float, keys: dict[str, list[str]]) -> dict[str, Any]:
        calls = {node: partial(self._call, node, "end", own) for node, own in keys.items()}
        _, failed = self._gather(calls, within_s)
        return {"failed": failed}

    def dismiss(self, within_s: float) -> dict[str, Any]:
        """End every agent of ours. What they started runs on."""
        names = [name for name in ray.util.list_named_actors() if name.startswith(PREFIX)]
        for name in names:
            ray.kill(ray.get_actor(name))
        return {"dismissed": len(names)}

    def _ask_facts(self, node: str) -> Any:
        with self._guard:
            pending = self._asked.get(node)
        if pending is None:
            pending = self._call(node, "facts")
            with self._guard:
                self._asked[node] = pending
        return pending

    def _call(self, node: str, verb: str, *args: Any) -> Any:
        return getattr(self._agent(node), verb).remote(self._setup["root"], *args)

    def _agent(self, node: str) -> Any:
        """The one on that node; made where there is none, or only one of another version of Shoal."""
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
        """By node; those that still owe an answer are not asked."""
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
        """Make all calls at once: the answers of those that came in time, and what became of the others."""
        refs, failed = {}, {}
        for key, call in calls.items():
            try:
                refs[key] = call()
            except (RayActorError, ValueError) as error:
                failed[key] = _words(error)
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
                failed[key] = _words(error)
                self._drop(node)
                self._end_if_stale(node, str(error))
            except Exception as error:  # noqa: BLE001 - whatever the agent raised is the answer
                failed[key] = _words(error)
        return answers, failed

    def _end_if_stale(self, node: str, said: str) -> None:
        """With this process; the next question starts another, which learns anew where agents are."""
        if "Connection refused" not in said:
            return
        since = self._refused_at.setdefault(node, time.monotonic())
        if time.monotonic() - since > STALE_S:
            sys.stderr.write(f"the agent on {node} is asked where it is no more: ended, to learn anew\n")
            sys.stderr.flush()
            os._exit(1)

    def _drop(self, node: str) -> None:
        """An agent that is not there is made anew by the next question."""
        with self._guard:
            self._agents.pop(node, None)
            self._asked.pop(node, None)
            self._late.pop(node, None)


_LATE = "its agent has not answered in time"


def _words(error: BaseException) -> str:
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).strip().splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[0] if lines else ''}"[:500]


def _load(path: str) -> ModuleType:
    """The agent's module, sent to nodes by value: none of them has to have it."""
    spec = importlib.util.spec_from_file_location("shoal_ray_agent", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["shoal_ray_agent"] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


def serve(lines: Iterable[str], tell: Callable[[dict[str, Any]], None]) -> None:
    """Until the lines end."""
    setup = json.loads(next(iter(lines)))
    try:
        bridge = Bridge(setup)
        tell({"ready": bridge.connect()})
    except BaseException as error:  # noqa: BLE001 - whatever it is, who waits must hear it
        traceback.print_exc()
        tell({"failed": f"{type(error).__name__}: {error}"})
        return
    pool = ThreadPoolExecutor(THREADS)
    for line in lines:
        pool.submit(_answer, bridge, json.loads(line), tell)


def _answer(bridge: Bridge, asked: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
    try:
        told = getattr(bridge, asked["verb"])(asked["within_s"], **asked["args"])
        tell({"id": asked["id"], "told": told})
    except Exception as error:  # noqa: BLE001 - it is the answer
        traceback.print_exc()
        tell({"id": asked["id"], "error": _words(error)})


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever Ray prints is no answer
    guard = threading.Lock()

    def tell(told: dict[str, Any]) -> None:
        with guard:
            out.write(json.dumps(told) + "\n")
            out.flush()

    serve(iter(sys.stdin.readline, ""), tell)
    os._exit(0)


if __name__ == "__main__":
    main()
