from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from xkv_gateway.service.histogram import Histogram, PowerHistogram
from xkv_gateway.service.meter import Meter
from xkv_gateway.service.reuse import WAIT_MAX_NS, ReuseTracker
from xkv_rpc import messages as m

if TYPE_CHECKING:
    from collections.abc import Sequence

S = 1_000_000_000


def count_below(values: Sequence[int], bound: float) -> int:
    return sum(value <= bound for value in values)


@given(st.lists(st.integers(0, 1 << 40)))
@settings(derandomize=True, max_examples=100)
def test_buckets_hold_what_is_not_above_their_bound(values: list[int]) -> None:
    plain, powers = Histogram((10, 1000, 1 << 30)), PowerHistogram()
    for value in values:
        plain.add(value)
        powers.add(value)
    assert plain.buckets(1) == [
        *((repr(bound / 1), count_below(values, bound)) for bound in plain.bounds),
        ("+Inf", len(values)),
    ]
    # A power of two itself has one bit more than the bucket below it.
    told = powers.buckets(4, 20, 1)
    assert [count for _, count in told[:-1]] == [count_below(values, 2**bits - 1) for bits in range(4, 21)]
    assert told[-1] == ("+Inf", len(values))
    assert plain.total == powers.total == sum(values)


def test_the_gap_is_from_the_last_write_to_the_next_read_only() -> None:
    tracker = ReuseTracker(lambda _: "t")
    tracker.stored("ns", b"s", [b"a", b"b"], 0)
    tracker.stored("ns", b"s", [b"a"], 5 * S)
    tracker.loaded("ns", b"s", [b"c", b"a"], 7 * S)
    tracker.loaded("ns", b"s", [b"a"], 9 * S)
    gaps = tracker.tenants["t"]
    assert (sum(gaps.seconds.counts), gaps.seconds.total) == (1, 2 * S)
    # Between them: the read of c.
    assert (sum(gaps.objects.counts), gaps.objects.total) == (1, 1)


def test_the_same_key_elsewhere_is_another_object() -> None:
    tracker = ReuseTracker(lambda scope: scope.decode())
    tracker.stored("ns", b"s", [b"k"], 0)
    tracker.loaded("n", b"s", [b"k"], 1)
    tracker.loaded("ns", b"t", [b"k"], 1)
    assert not any(sum(gaps.seconds.counts) for gaps in tracker.tenants.values())


def test_a_full_table_samples_and_a_sample_stands_for_the_rest() -> None:
    tracker = ReuseTracker(lambda _: "t", tracked_max=256)
    keys = [number.to_bytes(8, "big") for number in range(8192)]
    for key in keys:
        tracker.stored("ns", b"s", [key], 0)
        assert len(tracker._written) <= 256
    tracker.loaded("ns", b"s", keys, S)
    # A random sample: between half and twice of the truth is eight standard deviations.
    assert 4096 <= sum(tracker.tenants["t"].seconds.counts) <= 16384


def test_what_nobody_reads_for_a_day_makes_room_before_anything_is_sampled() -> None:
    tracker = ReuseTracker(lambda _: "t", tracked_max=100)
    tracker.stored("ns", b"s", [number.to_bytes(2, "big") for number in range(100)], 0)
    tracker.stored("ns", b"s", [b"young"], WAIT_MAX_NS + 1)
    assert tracker._mask == 0
    tracker.loaded("ns", b"s", [b"young"], WAIT_MAX_NS + 2)
    assert sum(tracker.tenants["t"].seconds.counts) == 1


def test_only_what_was_stored_and_what_was_read_counts() -> None:
    meter = Meter()
    keys = [b"a", b"b", b"c"]
    meter.stored(m.Store("ns", b"", keys, [1, 1, 1]), ["stored", "exists", "no_space"], 0)
    meter.loaded(m.Load("ns", b"", keys), ["miss", "ok", "ok"], S)
    meter.loaded(m.Load("ns", b"", keys), ["ok", "ok", "ok"], 2 * S)
    gaps = meter.reuse.tenants["other"]
    assert (sum(gaps.seconds.counts), gaps.seconds.total) == (1, 2 * S)
