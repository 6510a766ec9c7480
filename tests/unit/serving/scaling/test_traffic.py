"""The counters of data planes are added up over processes and time."""

from __future__ import annotations

from shoal.serving.scaling.autoscaler import ScalingRule, decide, should_sleep
from shoal.serving.scaling.rollout import quantile_s
from shoal.serving.scaling.traffic import FRESH_S, GONE_S, KEPT_S, MINUTES_KEPT, SECONDS_KEPT, Traffic
from shoal.serving.table import BOUNDS_S, ReleaseCounters, ReplicaHealth, ServingReport


def report(
    process_id: str, *, version: int = 1, health: tuple[ReplicaHealth, ...] = (), **counted: int
) -> ServingReport:
    count = ReleaseCounters(project="p", name="s", release=1, **counted)  # type: ignore[arg-type]
    return ServingReport(process_id=process_id, version=version, counts=(count,), health=health)


def test_first_report_of_a_process_is_its_starting_point() -> None:
    traffic = Traffic()
    traffic.record(report("a", requests=1000, errors=10), 0.0)
    assert traffic.stats("p", "s", 1).requests == 0
    traffic.record(report("a", requests=1007, errors=11), 1.0)
    stats = traffic.stats("p", "s", 1)
    assert (stats.requests, stats.errors) == (7, 1)


def test_processes_add_up_and_a_silent_one_counts_as_having_no_requests() -> None:
    traffic = Traffic()
    traffic.record(report("a", in_flight=2, queued=1), 10.0)
    traffic.record(report("b", in_flight=3), 10.5)
    assert (traffic.samples("p", "s")[-1].in_flight, traffic.samples("p", "s")[-1].queued) == (5, 1)
    traffic.record(report("b", in_flight=3), 11.0 + FRESH_S)
    assert traffic.samples("p", "s")[-1].in_flight == 3


def test_replica_is_idle_when_every_process_knows_that_it_drains_and_has_no_request_in_it() -> None:
    traffic = Traffic()
    busy = ReplicaHealth(replica_id="r", is_ejected=False, in_flight=1, failures=0)
    assert not traffic.is_idle("r", 5, 0.0)
    traffic.record(report("a", version=5), 0.0)
    traffic.record(report("b", version=4), 0.0)
    assert not traffic.is_idle("r", 5, 1.0)
    traffic.record(report("b", version=5, health=(busy,)), 1.0)
    assert not traffic.is_idle("r", 5, 1.0)
    traffic.record(report("b", version=6), 2.0)
    assert not traffic.is_idle("r", 5, 2.0), "a third one may not have come to speak yet"
    traffic.record(report("a", version=6), 5.0)
    assert traffic.is_idle("r", 5, 5.0)
    assert not traffic.is_idle("r", 5, 3.0 + FRESH_S), "who is silent may be serving on"
    traffic.record(report("b", version=6), GONE_S + 10.0)
    assert traffic.is_idle("r", 5, GONE_S + 10.0)


def test_table_is_known_when_every_process_reports_it_and_no_unknown_process_may_exist() -> None:
    traffic = Traffic()
    assert not traffic.is_known_everywhere(5, 100.0), "whoever serves did not come to speak yet"
    traffic.record(report("a", version=5), 100.0)
    assert not traffic.is_known_everywhere(5, 104.0), "another one may be there"
    traffic.record(report("b", version=4), 104.0)
    traffic.record(report("a", version=5), 110.0)
    assert not traffic.is_known_everywhere(5, 110.0), "who is silent may serve by the one before"
    assert traffic.is_known_everywhere(4, 110.0)
    assert traffic.is_known_everywhere(5, 104.0 + GONE_S), "it counts as ended"
    traffic.record(report("b", version=5), 111.0)
    assert traffic.is_known_everywhere(5, 111.0)


def test_process_with_a_last_report_is_not_waited_for() -> None:
    traffic = Traffic()
    traffic.record(report("a", version=5, in_flight=1), 0.0)
    traffic.record(report("b", version=5), 4.0)
    traffic.record(ServingReport(process_id="a", version=5, is_last=True), 4.0)
    assert not traffic.is_idle("r", 5, 4.0)
    assert traffic.is_idle("r", 5, FRESH_S)
    traffic.record(report("b", version=5), 5.0)
    assert traffic.samples("p", "s")[-1].in_flight == 0


def test_quantiles_cover_only_the_counts_since_a_moment() -> None:
    traffic = Traffic()
    slow = [0] * (len(BOUNDS_S) + 1)
    traffic.record(ServingReport(process_id="a", version=1, counts=(_timed(slow),)), 0.0)
    before = traffic.stats("p", "s", 1)
    slow[3], slow[-1] = 96, 4
    traffic.record(ServingReport(process_id="a", version=1, counts=(_timed(slow),)), 1.0)
    after = traffic.stats("p", "s", 1).since(before)
    assert quantile_s(after, 0.95) == BOUNDS_S[3]
    assert quantile_s(after, 0.99) == BOUNDS_S[-1]
    assert quantile_s(before, 0.95) is None


def _timed(counts: list[int]) -> ReleaseCounters:
    return ReleaseCounters(project="p", name="s", release=1, requests=sum(counts), first_byte_s=list(counts))


def test_idleness_of_more_than_an_hour_is_remembered() -> None:
    traffic = Traffic()
    rule = ScalingRule(least=0, most=8, to_zero_after_s=7200.0, sleep_after_s=5400.0)

    def listen(first: int, last: int) -> None:
        for second in range(first, last):
            traffic.record(report("a", requests=1), float(second))

    traffic.record(report("a", in_flight=20), 1000.0)
    listen(1001, 5500)
    samples = traffic.samples("p", "s")
    assert not should_sleep(rule, 1, samples, 5500.0, is_asleep=False)
    assert decide(rule, 8, samples, 5500.0, changed_s=1e6, cold_start_s=1200.0).replicas == 8
    assert max(sample.in_flight for sample in samples) == 20
    assert len(samples) < 3600 + 60
    listen(5500, 8300)
    samples = traffic.samples("p", "s")
    assert should_sleep(rule, 1, samples, 8300.0, is_asleep=False)
    assert decide(rule, 8, samples, 8300.0, changed_s=1e6, cold_start_s=1200.0).replicas == 1
    assert decide(rule, 1, samples, 8300.0, changed_s=1e6).replicas == 0


def test_samples_of_a_service_are_bounded() -> None:
    traffic = Traffic()
    for second in range(0, 2 * 90_000, 20):
        traffic.record(report("a"), float(second))
    samples = traffic.samples("p", "s")
    assert len(samples) <= SECONDS_KEPT + MINUTES_KEPT
    assert samples[-1].at - samples[0].at >= KEPT_S
    assert [sample.at for sample in samples] == sorted({sample.at for sample in samples})
