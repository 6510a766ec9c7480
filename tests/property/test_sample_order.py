"""The order of samples: a bijection, the same at any world size, exact after any restart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset

from shoal.errors import SpecError
from shoal.runtime.rank.sampler import Sampler, permute

sizes = st.integers(1, 500)
seeds = st.integers(0, 2**64 - 1)


class Numbers(Dataset[int]):
    """Each sample is its own index."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        return index


@contextmanager
def at(rank: int, world: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(rank))
        patch.setenv("WORLD_SIZE", str(world))
        yield


def global_batches(make: Sampler, world: int, count: int) -> list[list[int]]:
    """Return the first batches as all ranks together see them, each rank with its own sampler."""
    parts = []
    for rank in range(world):
        sampler = Sampler(make.size, global_batch=make.global_batch, seed=make.seed)
        sampler.load_state_dict(make.state_dict())
        with at(rank, world):
            loader = DataLoader(Numbers(make.size), batch_size=sampler.batch_size, sampler=sampler)
            parts.append([batch.tolist() for batch in islice(sampler.batches(loader), count)])
    return [[index for part in parts for index in part[batch]] for batch in range(count)]


@given(size=sizes, seed=seeds, epoch=st.integers(0, 2**32))
def test_an_epoch_holds_each_sample_exactly_once(size: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(size, dtype=np.uint64), size, seed, epoch)
    assert sorted(order.tolist()) == list(range(size))


@given(size=st.integers(2**40, 2**60), seed=seeds)
def test_positions_of_a_huge_set_stay_inside_it_and_apart(size: int, seed: int) -> None:
    positions = np.array([step * (size - 1) // 63 for step in range(64)], dtype=np.uint64)
    order = permute(positions, size, seed, 0)
    assert int(order.max()) < size
    assert len(set(order.tolist())) == len(set(positions.tolist()))


@settings(max_examples=20, deadline=None)
@given(size=sizes, seed=seeds, batch=st.integers(1, 6).map(lambda quarter: 4 * quarter))
def test_global_batches_are_the_same_at_any_world_size(size: int, seed: int, batch: int) -> None:
    sampler = Sampler(size, global_batch=batch, seed=seed)
    alone = global_batches(sampler, 1, 12)
    assert global_batches(sampler, 2, 12) == alone
    assert global_batches(sampler, 4, 12) == alone


@settings(max_examples=20, deadline=None)
@given(size=sizes, seed=seeds, stop=st.integers(0, 12), world=st.sampled_from([1, 2, 4]))
def test_a_run_resumed_at_another_world_size_sees_what_it_would_have_seen(
    size: int, seed: int, stop: int, world: int
) -> None:
    sampler = Sampler(size, global_batch=8, seed=seed)
    whole = global_batches(sampler, 2, 20)
    sampler.seek(stop)
    assert global_batches(sampler, world, 20 - stop) == whole[stop:]


@settings(max_examples=20, deadline=None)
@given(size=sizes, seed=seeds, batch=st.integers(1, 40))
def test_batches_that_cross_the_end_of_an_epoch_repeat_and_miss_nothing(
    size: int, seed: int, batch: int
) -> None:
    sampler = Sampler(size, global_batch=batch, seed=seed)
    count = -(-3 * size // batch)
    seen = [index for one in global_batches(sampler, 1, count) for index in one]
    for epoch in range(3):
        assert sorted(seen[epoch * size : (epoch + 1) * size]) == list(range(size))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_position_counts_yielded_samples_and_not_prefetched_ones(workers: int) -> None:
    sampler = Sampler(100, global_batch=8, seed=3)
    loader = DataLoader(Numbers(100), batch_size=8, sampler=sampler, num_workers=workers)
    batches = sampler.batches(loader)
    first = [next(batches).tolist() for _ in range(15)]
    assert sampler.position == 15 * 8
    batches.close()  # type: ignore[attr-defined]
    assert first == global_batches(Sampler(100, global_batch=8, seed=3), 1, 15)


def test_a_plain_loop_over_epochs_has_as_many_batches_as_the_loader_says() -> None:
    sampler = Sampler(10, global_batch=4, seed=1)
    loader = DataLoader(Numbers(10), batch_size=sampler.batch_size, sampler=sampler)
    lengths = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert len(loader) == len(list(loader))
        lengths.append(len(loader))
    assert lengths == [3, 2, 3]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    positions = np.arange(100, dtype=np.uint64)
    orders = {tuple(permute(positions, 100, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_a_batch_that_cannot_be_cut_into_equal_parts_is_refused_with_one_that_can() -> None:
    sampler = Sampler(100, global_batch=10)
    with at(0, 4), pytest.raises(SpecError) as refused:
        _ = sampler.batch_size
    assert refused.value.hint == "set global_batch=12"


def test_the_state_of_another_order_is_refused() -> None:
    saved = Sampler(100, global_batch=10, seed=1).state_dict()
    with pytest.raises(SpecError, match="seed 1"):
        Sampler(100, global_batch=10, seed=2).load_state_dict(saved)
