"""How long another caller waits for a submission while one caller sends the largest request of each kind.

    python -m benchmarks.largest_requests [--elements 10000]

The other caller submits one small job after another, in a project of its own, until the request is answered
and the work that follows from it is done.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks.measure import milliseconds, percentile, table
from benchmarks.peers.shoal import PROJECT, Shoal
from benchmarks.processes import wait_until

OTHER = "elsewhere"
SMALL: dict[str, Any] = {"resources": {"cpus": 0.01, "memory": "64MB"}}
BASELINE_S = 5.0
AT_LEAST = 50
"""Submissions beside each request. If the request ends sooner, a few more follow on an idle server."""
WITHIN_S = 600.0


@dataclass
class Beside:
    """How long one request took, and each of the other caller's submissions during that time."""

    what: str
    took_s: float
    each_s: list[float]


def beside(shoal: Shoal, what: str, act: Callable[[], object]) -> Beside:
    each: list[float] = []
    body = {"spec": {**SMALL, "run": "true", "after": ["held"]}, "project": OTHER}
    with ThreadPoolExecutor(1) as pool:
        done: Future[float] = pool.submit(_timed, act)
        while not done.done() or len(each) < AT_LEAST:
            each.append(_timed(lambda: shoal.request("POST", "/v1/jobs", body)))
        return Beside(what, done.result(), each)


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def measure(shoal: Shoal, elements: int) -> list[Beside]:
    limits = {"max_open_jobs": 10**6, "max_jobs_per_day": 10**6}
    shoal.request("POST", "/v1/projects", {"name": OTHER, **limits})
    shoal.request("PATCH", f"/v1/projects/{PROJECT}", limits)
    held = {**SMALL, "run": "sleep 3600", "name": "held"}
    shoal.request("POST", "/v1/jobs", {"spec": held, "project": OTHER})
    first = shoal.submit(held)["jobs"][0]["job_id"]
    many = {**SMALL, "run": "true", "array": elements}
    arrays: list[str] = []

    def submit(**more: Any) -> None:
        arrays.append(str(shoal.submit({**many, **more})["array_id"]))

    def stop_first() -> None:
        """Those that wait for it can never start."""
        shoal.request("POST", f"/v1/jobs/{first}/stop", {})
        wait_until(lambda: _num_queued(shoal) == 0, WITHIN_S, "the end of all that wait in vain")

    def serve(count: int) -> None:
        spec = {**SMALL, "name": "chat", "run": "sleep 3600", "replicas": count, "priority": -5}
        spec["resources"] = {"cpus": 1, "memory": "64MB"}
        reply = shoal.request("POST", "/v1/services", {"spec": spec, "project": PROJECT})
        services.append(str(reply["id"]))
        wait_until(lambda: _num_jobs(shoal, "chat") >= count, WITHIN_S, "all replicas")

    services: list[str] = []
    measured = [beside(shoal, "nothing", lambda: time.sleep(BASELINE_S))]
    measured.append(beside(shoal, f"submit an array of {elements:,}", lambda: submit(after=[first])))
    measured.append(beside(shoal, "list a page of 500 jobs, ten times", lambda: _listed(shoal, "jobs")))
    measured.append(beside(shoal, "list 500 events, ten times", lambda: _listed(shoal, "events")))
    why = f"/v1/jobs/{_element(shoal, arrays[0])}/why?predict=true"
    measured.append(beside(shoal, "why of an element, with a prediction", lambda: shoal.request("GET", why)))
    after = {**SMALL, "run": "true", "after": [arrays[0]]}
    measured.append(beside(shoal, f"submit a job after {elements:,} others", lambda: shoal.submit(after)))
    stop = f"/v1/arrays/{arrays[0]}/stop"
    measured.append(beside(shoal, f"stop an array of {elements:,}", lambda: shoal.request("POST", stop, {})))
    submit(after=[first])
    measured.append(beside(shoal, f"end {elements:,} that wait in vain", stop_first))
    measured.append(beside(shoal, "a service of 200 replicas", lambda: serve(200)))
    end = f"/v1/services/{services[0]}/stop"
    measured.append(beside(shoal, "stop that service", lambda: _ended(shoal, end)))
    return measured


def _ended(shoal: Shoal, path: str) -> None:
    shoal.request("POST", path, {})
    wait_until(lambda: not shoal.request("GET", "/v1/services")["items"], WITHIN_S, "the service's end")


def _listed(shoal: Shoal, what: str) -> None:
    for _ in range(10):
        shoal.request("GET", f"/v1/{what}?limit=500")


def _element(shoal: Shoal, array_id: str) -> str:
    return str(shoal.request("GET", f"/v1/jobs?array={array_id}&limit=1")["items"][0]["job_id"])


def _num_queued(shoal: Shoal) -> int:
    page = shoal.request("GET", f"/v1/jobs?project={PROJECT}&status=queued&limit=1")
    return len(page["items"])


def _num_jobs(shoal: Shoal, name: str) -> int:
    page = shoal.request("GET", f"/v1/jobs?project={PROJECT}&name={name}&limit=500")
    return len(page["items"])


def render(measured: list[Beside]) -> str:
    rows = [
        [
            row.what,
            milliseconds(row.took_s),
            str(len(row.each_s)),
            milliseconds(percentile(row.each_s, 0.5)),
            milliseconds(percentile(row.each_s, 0.99)),
            milliseconds(max(row.each_s)),
        ]
        for row in measured
    ]
    header = ["one caller's request", "took", "submissions beside it", "p50", "p99", "longest"]
    return table("A submission in another project, beside the largest requests", header, rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=10_000, help="of an array")
    args = parser.parse_args()
    with Shoal() as shoal:
        print(render(measure(shoal, args.elements)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
