"""Turn `show stat` of HAProxy into a `ServingReport`; the sums outlive workers and servers. Pure."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterable, Mapping

import msgspec

from shoal.serving.table import ReleaseCounters, ReplicaConfig, ReplicaHealth, ServingReport

ANSWERED = ("hrsp_1xx", "hrsp_2xx", "hrsp_3xx", "hrsp_4xx", "hrsp_5xx", "hrsp_other")


class StatRow(msgspec.Struct, frozen=True):
    """A line of `show stat`: a server, or a whole backend (`server` is `BACKEND`).

    A reply that never came, or made no sense (`eresp`), counts as a request and an error.
    """

    backend: str
    server: str
    in_flight: int
    queued: int
    requests: int
    errors: int
    status: str


def parse_stat(text: str) -> list[StatRow]:
    """Return the lines of services, whose names have a colon in them."""
    rows = csv.DictReader(text.removeprefix("# ").splitlines())
    return [
        StatRow(
            row["pxname"],
            row["svname"],
            int(row["scur"] or 0),
            int(row["qcur"] or 0),
            sum(int(row[name] or 0) for name in (*ANSWERED, "eresp")),
            int(row["hrsp_5xx"] or 0) + int(row["eresp"] or 0),
            row["status"],
        )
        for row in rows
        if ":" in (row["pxname"] or "")
    ]


class StatTotals:
    """Counters since this data plane started, across all of HAProxy's workers and servers."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str, str], StatRow] = {}
        self._counts: dict[tuple[str, int], ReleaseCounters] = {}

    def take(
        self,
        rows: Mapping[int, list[StatRow]],
        replicas: Mapping[str, ReplicaConfig],
        empty: Collection[str] = (),
    ) -> None:
        """Add counters. `rows` are by worker; `replicas` by `backend/server`, including those that are
        leaving.

        A request turned away by an `empty` backend counts as waiting, because that makes a replica start.
        """
        fresh = {(pid, row.backend, row.server): row for pid, listed in rows.items() for row in listed}
        for count in self._counts.values():
            count.in_flight = count.queued = 0
        for key, row in fresh.items():
            before = self._seen.get(key)
            replica = replicas.get(f"{row.backend}/{row.server}")
            # A backend counts requests that may go to any server; with affinity, a server counts its own.
            self._count(row.backend, 0).queued += row.queued
            if row.server == "BACKEND":
                if row.backend in empty:
                    self._count(row.backend, 0).queued += row.errors - (before.errors if before else 0)
            elif replica is not None:
                count = self._count(row.backend, replica.release)
                count.in_flight += row.in_flight
                count.requests += row.requests - (before.requests if before else 0)
                count.errors += row.errors - (before.errors if before else 0)
        self._seen = fresh

    @property
    def server_names(self) -> set[str]:
        """Servers that some worker still has."""
        return {f"{row.backend}/{row.server}" for row in self._seen.values()}

    def report(self, process_id: str, version: int, replicas: Mapping[str, ReplicaConfig]) -> ServingReport:
        rows = self._seen.values()
        names = {row.backend for row in rows}
        return ServingReport(
            process_id=process_id,
            version=version,
            counts=tuple(count for (name, _), count in self._counts.items() if name in names),
            health=tuple(_health(replica, name, rows) for name, replica in replicas.items()),
        )

    def _count(self, backend: str, release: int) -> ReleaseCounters:
        project, _, name = backend.partition(":")
        fresh_counters = ReleaseCounters(project=project, name=name, release=release)
        return self._counts.setdefault((backend, release), fresh_counters)


def _health(replica: ReplicaConfig, name: str, rows: Iterable[StatRow]) -> ReplicaHealth:
    mine = [row for row in rows if f"{row.backend}/{row.server}" == name]
    return ReplicaHealth(
        replica_id=replica.replica_id,
        is_ejected=any(row.status.startswith("DOWN") for row in mine),
        in_flight=sum(row.in_flight for row in mine),
        failures=0,
    )
