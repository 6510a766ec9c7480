"""What this process tells about itself once a second: a `Report`, and the same as text for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import monotonic

from shoal.serving.plane import DataPlane
from shoal.serving.replica import Tally
from shoal.serving.service import LiveService
from shoal.serving.table import BOUNDS_S, Count, Health, Report


def report(plane: DataPlane) -> Report:
    now = monotonic()
    counts = [
        _count(live, tally)
        for live in plane.services.values()
        for tally in live.tallies.values()
        if tally.release or tally.requests or live.waiting.count
    ]
    health = [
        Health(
            replica_id=replica.spec.replica_id,
            is_ejected=replica.is_ejected(now),
            in_flight=replica.outstanding,
            failures=replica.failures,
        )
        for live in plane.services.values()
        for replica in live.replicas.values()
    ]
    return Report(
        process_id=plane.process_id,
        version=plane.version,
        epoch=plane.epoch,
        counts=tuple(counts),
        health=tuple(health),
    )


def _count(live: LiveService, tally: Tally) -> Count:
    return Count(
        project=live.spec.project,
        name=live.spec.name,
        release=tally.release,
        in_flight=tally.in_flight,
        queued=live.waiting.count if tally.release == 0 else 0,
        requests=tally.requests,
        errors=tally.errors,
        first_byte_s=list(tally.first_byte),
        tokens=tally.tokens,
    )


def metrics(plane: DataPlane) -> str:
    """In Prometheus' text format."""
    told = report(plane)
    lines = [
        *_series("shoal_serving_table_version", "gauge", [("", plane.version)]),
        *_series("shoal_serving_table_left_out", "gauge", [("", len(plane.left_out))]),
        *_series("shoal_serving_table_stale", "gauge", [("", int(plane.freshness.is_stale))]),
        *_series("shoal_serving_connections", "gauge", [("", len(plane.clients))]),
        *_series(
            "shoal_serving_refused_total",
            "counter",
            [(_labels(status=status, code=code), n) for (status, code), n in plane.refusals.items()],
        ),
        *_series(
            "shoal_serving_repeated_total",
            "counter",
            [(_labels(project=p, service=n), live.repeated) for (p, n), live in plane.services.items()],
        ),
    ]
    for name, kind in (
        ("in_flight", "gauge"),
        ("queued", "gauge"),
        ("requests", "counter"),
        ("errors", "counter"),
        ("tokens", "counter"),
    ):
        shown = f"shoal_serving_{name}" + ("_total" if kind == "counter" else "")
        lines += _series(shown, kind, [(_of(count), getattr(count, name)) for count in told.counts])
    lines += _histogram(told.counts)
    ejected = [(_labels(replica=seen.replica_id), int(seen.is_ejected)) for seen in told.health]
    lines += _series("shoal_serving_replica_ejected", "gauge", ejected)
    return "\n".join(lines) + "\n"


def _histogram(counts: Iterable[Count]) -> Iterator[str]:
    name = "shoal_serving_first_byte_seconds"
    yield f"# TYPE {name} histogram"
    for count in counts:
        total = 0
        for bound, number in zip([*BOUNDS_S, "+Inf"], count.first_byte_s, strict=True):
            total += number
            yield f"{name}_bucket{_of(count, le=bound)} {total}"
        yield f"{name}_count{_of(count)} {total}"


def _series(name: str, kind: str, values: Iterable[tuple[str, float]]) -> Iterator[str]:
    yield f"# TYPE {name} {kind}"
    for labels, value in values:
        yield f"{name}{labels} {value}"


def _of(count: Count, **more: object) -> str:
    return _labels(project=count.project, service=count.name, release=count.release, **more)


def _labels(**labels: object) -> str:
    """Names of projects, services and replicas need no escapes: they are words."""
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"
