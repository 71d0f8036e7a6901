"""The budget of bytes written a day: what is beyond is refused at once, and an hour counts for a day."""

from __future__ import annotations

from xkv_gateway.core.budget import DAY_HOURS, HOUR_S, Budget
from xkv_gateway.core.types import StoreStatus, WritePlan

from .helpers import SECOND_NS, World, keys


def test_each_key_is_taken_as_long_as_the_budget_lasts_and_refused_beyond_without_costing_anybody_anything() -> (
    None
):
    w = World(written_bytes_per_day=5 * 1024)
    w.store(keys(3))
    entries = w.begin(keys(4, "m"))
    assert [isinstance(entry, WritePlan) for entry in entries] == [True, True, False, False]
    assert entries[2:] == [StoreStatus.NO_SPACE] * 2
    assert w.engine.counters.budget == 2
    assert w.engine.counters.no_space == w.engine.counters.evicted_demand == 0
    assert w.begin(keys(1)) == [StoreStatus.EXISTS]


def test_room_comes_back_a_day_after_the_hour_in_which_it_was_taken() -> None:
    w = World(written_bytes_per_day=2 * 1024)
    w.store(keys(1))
    w.now_ns += HOUR_S * SECOND_NS
    w.store(keys(1, "m"))
    w.now_ns += (DAY_HOURS - 2) * HOUR_S * SECOND_NS
    assert w.begin(keys(1, "x")) == [StoreStatus.NO_SPACE]
    w.now_ns += HOUR_S * SECOND_NS
    w.store(keys(1, "x"))
    assert w.begin(keys(1, "y")) == [StoreStatus.NO_SPACE]


def test_without_a_budget_everything_is_taken_and_counted() -> None:
    w = World()
    w.store(keys(20))
    assert w.engine.budget.left(0) is None
    assert w.engine.budget.written(0) == 20 * 1024


def test_hours_are_forgotten_so_there_are_never_more_than_a_day_has() -> None:
    budget = Budget(10)
    for hour in range(100):
        budget.spend(1, hour * HOUR_S)
        assert len(budget.hours) <= DAY_HOURS
        assert budget.written(hour * HOUR_S) == min(hour + 1, DAY_HOURS)
    assert budget.written(1000 * HOUR_S) == 0
