"""What every store must do with curves: bounded, whole at their ends, one word for each step."""

from __future__ import annotations

from shoal.curve import Axis, Point, Samples, single_point
from shoal.store import Store
from shoal.store.tables.metrics import MAX_POINTS, MAX_SERIES


def samples(*points: Point, name: str = "loss", rank: int | None = 0) -> Samples:
    return Samples(name=name, axis=Axis.STEP, points=points, rank=rank)


def steps(first: int, end: int, value: float) -> tuple[Point, ...]:
    return tuple(single_point(step, value) for step in range(first, end))


class MetricsContract:
    """The part of `StoreContract` that is about metrics."""

    __test__ = False

    async def test_curve_comes_back_in_order_with_no_number_as_none(self, store: Store) -> None:
        await add(store, samples(single_point(2, 2.0), single_point(1, float("nan"))))
        assert await curve(store) == [Point(1, None, None, None), Point(2, 2.0, 2.0, 2.0)]

    async def test_points_told_twice_change_nothing(self, store: Store) -> None:
        for _ in range(2):
            await add(store, samples(*steps(0, 10, 1.0)))
        assert await curve(store) == list(steps(0, 10, 1.0))

    async def test_step_made_again_has_its_later_value_and_the_curve_does_not_go_back(
        self, store: Store
    ) -> None:
        await add(store, samples(*steps(0, 10, 1.0)))
        await add(store, samples(*steps(5, 8, 2.0)), epoch=2)
        assert [point.last for point in await curve(store)] == [1.0] * 5 + [2.0] * 3 + [1.0] * 2

    async def test_newest_is_what_was_said_last_also_where_steps_are_made_again(self, store: Store) -> None:
        await add(store, samples(*steps(0, 10, 1.0)))
        assert await newest(store) == (9, 1.0)
        await add(store, samples(*steps(5, 8, 2.0)), epoch=2)
        assert await newest(store) == (7, 2.0)
        again = Samples(
            name="loss",
            axis=Axis.STEP,
            points=steps(5, 12, 3.0),
            rank=0,
            newest=single_point(6, float("nan")),
        )
        await add(store, again, epoch=2)
        assert await newest(store) == (6, None)

    async def test_long_curve_is_bounded_and_keeps_its_ends_and_extremes(self, store: Store) -> None:
        for first in range(0, 5000, 250):
            await add(
                store, samples(*(single_point(step, float(step)) for step in range(first, first + 250)))
            )
            kept = await curve(store)
            assert len(kept) <= MAX_POINTS
            assert (kept[0].low, kept[-1].x, kept[-1].last) == (0.0, first + 249, float(first + 249))
        assert len(await curve(store)) >= MAX_POINTS // 4
        await add(store, samples(single_point(0, -7.0)))
        assert (await curve(store))[0].low == -7.0

    async def test_of_two_ranks_the_lower_counts_until_another_attempt_speaks(self, store: Store) -> None:
        await add(store, samples(single_point(1, 1.0), rank=3))
        await add(store, samples(single_point(2, 2.0), rank=1))
        await add(store, samples(single_point(3, 3.0), rank=2))
        assert [point.x for point in await curve(store)] == [1, 2]
        await add(store, samples(single_point(4, 4.0), rank=2), epoch=2)
        assert [point.x for point in await curve(store)] == [1, 2, 4]

    async def test_what_nodes_measure_is_kept_for_each_of_them(self, store: Store) -> None:
        for node in ("n1", "n2"):
            await add(store, samples(single_point(1, 1.0), name="cpus_used", rank=None), node=node)
        found = await store.read(lambda tx: tx.metrics.series("job_1"))
        assert [(one.name, one.node, one.rank) for one in found] == [
            ("cpus_used", "n1", None),
            ("cpus_used", "n2", None),
        ]

    async def test_more_series_than_a_job_may_have_are_dropped_and_counted(self, store: Store) -> None:
        many = [samples(single_point(0, 0.0), name=f"m{at}") for at in range(MAX_SERIES + 5)]
        assert await store.write(lambda tx: tx.metrics.add("job_1", 1, "n1", many, 10.0)) == 5
        assert len(await store.read(lambda tx: tx.metrics.series("job_1"))) == MAX_SERIES

    async def test_silent_jobs_are_found_and_dropped(self, store: Store) -> None:
        await add(store, samples(single_point(0, 0.0)), now=10.0)
        await add(store, samples(single_point(0, 0.0)), now=20.0, job_id="job_2")
        assert await store.read(lambda tx: tx.metrics.silent(15.0, 10)) == ["job_1"]
        for _ in range(2):
            await store.write(lambda tx: tx.metrics.drop("job_1", 1000))
        assert await store.read(lambda tx: tx.metrics.series("job_1")) == []
        assert await store.read(lambda tx: tx.metrics.silent(99.0, 10)) == ["job_2"]

    async def test_many_points_of_a_job_are_dropped_some_at_a_time(self, store: Store) -> None:
        for name in ("loss", "lr"):
            await add(store, samples(*steps(0, 5, 1.0), name=name), now=10.0)
        await add(store, samples(*steps(0, 5, 1.0)), now=10.0, job_id="job_2")
        done = [await store.write(lambda tx: tx.metrics.drop("job_1", 4)) for _ in range(3)]
        assert done == [False, False, True]
        assert await store.read(lambda tx: tx.metrics.series("job_1")) == []
        (left,) = await store.read(lambda tx: tx.metrics.series("job_2"))
        assert len(await store.read(lambda tx: tx.metrics.points("job_2", left))) == 5

    async def test_rows_of_all_jobs_are_counted_and_the_longest_silent_is_named_first(
        self, store: Store
    ) -> None:
        assert await store.read(lambda tx: (tx.metrics.num_rows(), tx.metrics.oldest(0, 10))) == (0, [])
        await add(store, samples(*steps(0, 5, 1.0)), now=20.0)
        await add(store, samples(*steps(0, 2, 1.0)), now=10.0, job_id="job_2")
        await add(store, samples(*steps(0, 2, 1.0), name="lr"), now=15.0, job_id="job_2")
        assert await store.read(lambda tx: tx.metrics.num_rows()) == 12
        assert await store.read(lambda tx: tx.metrics.oldest(0, 10)) == [("job_2", 6), ("job_1", 6)]
        assert await store.read(lambda tx: tx.metrics.oldest(1, 1)) == [("job_1", 6)]


async def add(
    store: Store,
    batch: Samples,
    *,
    epoch: int = 1,
    node: str = "n1",
    now: float = 10.0,
    job_id: str = "job_1",
) -> None:
    assert await store.write(lambda tx: tx.metrics.add(job_id, epoch, node, [batch], now)) == 0


async def newest(store: Store) -> tuple[int, float | None] | None:
    return await store.read(lambda tx: tx.metrics.series("job_1")[0].newest)


async def curve(store: Store) -> list[Point]:
    return await store.read(lambda tx: tx.metrics.points("job_1", tx.metrics.series("job_1")[0]))
