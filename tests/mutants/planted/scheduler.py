"""Bugs in the plan of a cycle."""

from __future__ import annotations

from tests.mutants.planted.mutant import Mutant

MUTANTS = (
    Mutant(
        "gpus_counted_not_named",
        "scheduler/facts/gpu_use.py",
        "self.unused = tuple(gpu for gpu in self.all if gpu.index not in self._used)",
        "self.unused = self.all[len(self._used) :]",
        "nothing is given twice",
        ("sim",),
    ),
    Mutant(
        "half_a_gang_starts",
        "scheduler/placement/gang.py",
        "return ranked if len(ranked) >= demand.min_nodes else []",
        "return ranked",
        "a gang starts whole or not at all",
        ("sim",),
    ),
    Mutant(
        "array_limit_counts_only_the_past",
        "scheduler/facts/cluster_state.py",
        "            self._num_of_array[holding.array_id] += 1\n",
        "            self._num_of_array[holding.array_id] += 0\n",
        "an array keeps its own limit",
        ("sim",),
    ),
)
