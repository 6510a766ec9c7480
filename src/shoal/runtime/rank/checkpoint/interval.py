"""How often to save: where what saving costs and what a failure loses are the least together. Pure."""

from __future__ import annotations

import math

FAILURES_PER_NODE_DAY = 6.5e-3
"""Of a node with eight A100s, over eleven months of a large research cluster: arXiv:2410.21680."""
DAY_S = 86400.0


def young_daly_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of training between two saves that each hold it up for `cost_s`, with so long between failures.

    Young's first order: losing half an interval for each failure costs as much as saving does. Exact enough
    while the cost is far below the time between failures.
    """
    return math.sqrt(2.0 * cost_s * mtbf_s)


def mtbf_s(*, num_nodes: int, failures: int, run_s: float) -> float:
    """Expected seconds between failures: the field's rate, weighed as one failure seen, and the job's own."""
    expected_s = DAY_S / (FAILURES_PER_NODE_DAY * num_nodes)
    return (expected_s + run_s) / (1 + failures)


def steps_between(*, cost_s: float, written_s: float, mtbf_s: float, step_s: float) -> int:
    """Whole steps from one save to the next, at least one.

    `written_s`: how long a save goes on in the background; the next one does not begin before it is done.
    """
    wanted_s = max(young_daly_s(cost_s, mtbf_s), written_s)
    return max(1, math.ceil(wanted_s / max(step_s, 1e-6)))
