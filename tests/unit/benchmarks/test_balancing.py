"""The simulation that justifies the balancer's defaults says the same every time, and what is claimed."""

from __future__ import annotations

from benchmarks.balancing import fairness, lognormal, policies


def test_work_bound_late_waits_far_less_than_work_placed_at_random() -> None:
    found = policies(0, 1, 0.85, lognormal, 4000)
    assert found["least outstanding, bound late (Shoal)"] < 0.1 * found["random"]
    assert found == policies(0, 1, 0.85, lognormal, 4000)


def test_greedy_caller_leaves_the_others_their_p99_within_a_fifth() -> None:
    found = fairness(0, 400)
    assert found["beside a caller at 100 times its share"] < 1.2 * found["alone"]
    assert found["the same, if all stood in one line"] > 5 * found["alone"]
