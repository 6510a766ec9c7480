"""Try one learning rate: element N of an array takes the N-th. No package is needed."""

from __future__ import annotations

import os
import random
import time

RATES = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 0.9]
STEPS = 200
PAUSE_S = float(os.environ.get("PAUSE_S", "0.01"))
"""After each step; stands for the work of a larger model."""


def main() -> None:
    index = int(os.environ["SHOAL_ARRAY_INDEX"])
    rate = RATES[index % len(RATES)]
    print(f"rate {rate:<5}  loss after {STEPS} steps {fit(rate):.2g}", flush=True)


def fit(rate: float) -> float:
    """Fit y = 3x - 1 by stochastic gradient descent; the mean squared error at the end."""
    chance = random.Random(0)
    slope = offset = 0.0
    points = [(x, 3 * x - 1) for x in (chance.uniform(-1, 1) for _ in range(64))]
    for _ in range(STEPS):
        x, y = chance.choice(points)
        error = slope * x + offset - y
        slope -= rate * 2 * error * x
        offset -= rate * 2 * error
        time.sleep(PAUSE_S)
    return sum((slope * x + offset - y) ** 2 for x, y in points) / len(points)


if __name__ == "__main__":
    main()
