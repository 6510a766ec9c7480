"""Nodes that fail by themselves: after exponential times, for a fixed time, the same for the same seed."""

from __future__ import annotations

from random import Random

import msgspec

from shoal.errors import SpecError


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """`mtbf_s` is the mean time in service of one node between two failures."""

    mtbf_s: float
    repair_s: float
    seed: int = 1

    def __post_init__(self) -> None:
        if self.mtbf_s <= 0 or self.repair_s < 0:
            raise SpecError(
                f"a node that fails every {self.mtbf_s:g} s for {self.repair_s:g} s: the first must be "
                "above 0, the second not below",
                hint="--mtbf 60d --repair 4h",
            )

    def more_often(self, times: float) -> Failures:
        return msgspec.structs.replace(self, mtbf_s=self.mtbf_s / times)


class NodeLuck:
    """When one node fails next. Each node draws for itself, so that another node changes nothing for it."""

    def __init__(self, failures: Failures, node: str) -> None:
        self._random = Random(f"{failures.seed}:{node}")
        self._rate = 1 / failures.mtbf_s

    def time_in_service(self) -> float:
        return self._random.expovariate(self._rate)
