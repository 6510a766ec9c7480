"""What is said of proxies follows from what was seen of them."""

from __future__ import annotations

from benchmarks.proxy.goals import goals
from benchmarks.proxy.payload import POST_BYTES, WANTS_EVENTS, chat
from benchmarks.proxy.samples import Case, Sample, Samples
from benchmarks.proxy.unary import lua, parse

GET, POST, STREAM = Case("get", "GET", 32), Case("post", "POST", 32), Case("stream", "stream", 64)
FRESH = Case("fresh", "POST", 32, is_fresh=True)
UNLIKE = Case("unlike", "GET", 32, is_fresh=True, is_unlike=True)
REST, WHOLE = Case("rest", "GET", 1), Case("whole", "GET", 32)
OURS = "Shoal, all on"


def seen(*rows: tuple[Case, str, float]) -> Samples:
    samples = Samples()
    for case, name, cpu_us in rows:
        samples.add(case, name, Sample(cpu_us, 1e6 / cpu_us, cpu_us / 1e6, cpu_us / 1e5, 0))
    return samples


def verdicts(samples: Samples) -> dict[str, str]:
    return {
        goal.what: goal.verdict
        for goal in goals(samples, [GET, POST], [FRESH], [STREAM], REST, [UNLIKE], [WHOLE])
    }


def test_ratios_are_made_within_a_round_so_that_a_slow_one_tells_nothing() -> None:
    rounds = [(10.0, 20.0), (100.0, 200.0), (11.0, 22.0)]
    samples = seen(*((GET, "nginx", a) for a, _ in rounds), *((GET, OURS, b) for _, b in rounds))
    assert samples.cost(GET, OURS, "nginx") == 2.0
    assert samples.speed(GET, "nginx", OURS) == 2.0


def test_a_goal_is_judged_by_its_worst_case() -> None:
    samples = seen((GET, "nginx", 10), (GET, OURS, 12), (POST, "nginx", 10), (POST, OURS, 17))
    assert verdicts(samples)["CPU of a request beside nginx"] == "missed"
    samples = seen((GET, "nginx", 10), (GET, OURS, 12), (POST, "nginx", 10), (POST, OURS, 15))
    assert verdicts(samples)["CPU of a request beside nginx"] == "met"


def test_a_router_must_be_dearer_and_ray_serve_slower() -> None:
    samples = seen((POST, "vLLM router", 29), (POST, OURS, 10), (WHOLE, OURS, 10), (WHOLE, "Ray Serve", 300))
    said = verdicts(samples)
    assert said["CPU of a POST, vLLM router beside ours"] == "missed"
    assert said["CPU of a request, Ray Serve's proxy beside ours"] == "met"
    assert said["requests/s end to end beside Ray Serve"] == "met"


def test_requests_whose_heads_never_repeat_are_judged_by_themselves() -> None:
    rows = [(POST, "nginx", 10.0), (POST, OURS, 12.0), (FRESH, "nginx", 10.0), (FRESH, OURS, 17.0)]
    said = verdicts(seen(*rows, (FRESH, "vLLM router", 60.0)))
    assert said["CPU of a request beside nginx"] == "met"
    assert said["CPU of a request beside nginx, an id and a trace each"] == "missed"
    assert said["CPU of a POST, vLLM router beside ours, an id and a trace each"] == "met"
    assert said["CPU of a POST, vLLM router beside ours"] == "not measured"
    said = verdicts(
        seen((FRESH, "nginx", 10.0), (FRESH, OURS, 15.0), (UNLIKE, "nginx", 10.0), (UNLIKE, OURS, 17.0))
    )
    assert said["CPU of a request beside nginx, an id and a trace each"] == "met"
    assert said["CPU of a request beside nginx, a query and a cookie each"] == "missed"


def test_no_burst_repeats_the_heads_of_another() -> None:
    assert lua(FRESH) != lua(FRESH)
    assert (lua(GET), lua(POST)) == (lua(GET), lua(POST))


def test_what_was_not_there_is_neither_met_nor_missed() -> None:
    assert set(verdicts(Samples()).values()) == {"not measured"}


def test_bodies_are_as_long_as_they_should_be_and_ask_for_what_they_should() -> None:
    assert len(chat(size=POST_BYTES)) == POST_BYTES
    assert WANTS_EVENTS not in chat(size=POST_BYTES)
    assert WANTS_EVENTS in chat(is_stream=True)


def test_failures_that_wrk_tells_of_are_counted() -> None:
    told = """
    50%    1.50ms
    99%   12.00ms
  1000 requests in 1.00s, 1.00MB read
  Socket errors: connect 0, read 1, write 0, timeout 2
  Non-2xx or 3xx responses: 3
"""
    burst = parse(told)
    assert (burst.requests, burst.failed, burst.p50_s, burst.p99_s) == (1000, 6, 0.0015, 0.012)
