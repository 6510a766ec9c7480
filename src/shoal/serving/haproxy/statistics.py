"""What HAProxy counts, as a `Report`: `show stat` is read, and sums outlive workers and servers. Pure."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterable, Mapping

import msgspec

from shoal.serving.table import Count, Health, Replica, Report

ANSWERED = ("hrsp_1xx", "hrsp_2xx", "hrsp_3xx", "hrsp_4xx", "hrsp_5xx", "hrsp_other")


class Row(msgspec.Struct, frozen=True):
    """A line of `show stat`: a server, or all of a backend (`server` is `BACKEND`).

    An answer that never came, or made no sense (`eresp`), is a request and an error.
    """

    backend: str
    server: str
    in_flight: int
    queued: int
    requests: int
    errors: int
    status: str


def parse_stat(told: str) -> list[Row]:
    """Lines of services alone: their names have a colon in them."""
    rows = csv.DictReader(told.removeprefix("# ").splitlines())
    return [
        Row(
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


class Sums:
    """Counters since this data plane started, whatever HAProxy's workers and servers came and went."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str, str], Row] = {}
        self._counts: dict[tuple[str, int], Count] = {}

    def take(
        self, rows: Mapping[int, list[Row]], replicas: Mapping[str, Replica], empty: Collection[str] = ()
    ) -> None:
        """`rows` by worker, `replicas` by `backend/server`, also those that are leaving.

        Who is turned away by a backend that is `empty` counts as waiting: that is what has a replica started.
        """
        fresh = {(pid, row.backend, row.server): row for pid, listed in rows.items() for row in listed}
        for count in self._counts.values():
            count.in_flight = count.queued = 0
        for key, row in fresh.items():
            before = self._seen.get(key)
            replica = replicas.get(f"{row.backend}/{row.server}")
            # Of a backend those that may go anywhere, of a server those that wait for it (affinity).
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
    def names(self) -> set[str]:
        """Of servers that some worker still has."""
        return {f"{row.backend}/{row.server}" for row in self._seen.values()}

    def report(self, process_id: str, version: int, replicas: Mapping[str, Replica]) -> Report:
        rows = self._seen.values()
        names = {row.backend for row in rows}
        return Report(
            process_id=process_id,
            version=version,
            counts=tuple(count for (name, _), count in self._counts.items() if name in names),
            health=tuple(_health(replica, name, rows) for name, replica in replicas.items()),
        )

    def _count(self, backend: str, release: int) -> Count:
        project, _, name = backend.partition(":")
        made = Count(project=project, name=name, release=release)
        return self._counts.setdefault((backend, release), made)


def _health(replica: Replica, name: str, rows: Iterable[Row]) -> Health:
    mine = [row for row in rows if f"{row.backend}/{row.server}" == name]
    return Health(
        replica_id=replica.replica_id,
        is_ejected=any(row.status.startswith("DOWN") for row in mine),
        in_flight=sum(row.in_flight for row in mine),
        failures=0,
    )
