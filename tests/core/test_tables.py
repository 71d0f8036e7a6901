"""The tables that the engine is made of, each against the plainest thing that does the same."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from xkv_gateway.core.allocator import CHUNK_AU, EXTENTS_MAX, Allocator
from xkv_gateway.core.digest import Digester, derive_key
from xkv_gateway.core.errors import IllegalTransition
from xkv_gateway.core.index import Index
from xkv_gateway.core.lifecycle import TRANSITIONS, Event, State, next_state, next_states
from xkv_gateway.core.recency import CHUNK_MAX, SWEEP_SLACK, Recency, UseLog

from .helpers import SECRET, World, keys

BOUNDED = settings(max_examples=60, derandomize=True, deadline=None)


def test_the_lifecycle_allows_exactly_the_pairs_of_its_table() -> None:
    for state, event in itertools.product(State, Event):
        before = np.array([state], np.uint8)
        if (state, event) in TRANSITIONS:
            assert next_states(before, event).tolist() == [TRANSITIONS[state, event]]
            assert next_state(int(state), event) == TRANSITIONS[state, event]
        else:
            with pytest.raises(IllegalTransition, match=f"{state.name} and {event.name}"):
                next_states(before, event)
            with pytest.raises(IllegalTransition, match=f"{state.name} and {event.name}"):
                next_state(int(state), event)


# --- digests ----------------------------------------------------------------------------------------------

IDENTITY = st.tuples(st.text(max_size=3), st.binary(max_size=3), st.binary(min_size=1, max_size=40))


def reference_digest(namespace: str, scope: bytes, key: bytes) -> int:
    padded = key + bytes(-len(key) % 16)
    aes_key = derive_key(SECRET, namespace, scope, len(key))
    cbc = Cipher(algorithms.AES(aes_key), modes.CBC(bytes(16))).encryptor()
    return int.from_bytes(cbc.update(padded)[-16:], "little")


@BOUNDED
@given(st.text(max_size=3), st.binary(max_size=3), st.lists(st.binary(min_size=1, max_size=40), max_size=8))
def test_a_batch_of_digests_is_what_one_by_one_gives_in_order(
    namespace: str, scope: bytes, batch: list[bytes]
) -> None:
    low, high = Digester(SECRET).digest(namespace, scope, batch)
    together = [h << 64 | lo for lo, h in zip(low.tolist(), high.tolist(), strict=True)]
    assert together == [reference_digest(namespace, scope, key) for key in batch]


@BOUNDED
@given(st.lists(IDENTITY, min_size=2, max_size=30, unique=True))
def test_different_identities_have_different_digests(identities: list[tuple[str, bytes, bytes]]) -> None:
    digester = Digester(SECRET)
    digests = set()
    for namespace, scope, key in identities:
        low, high = digester.digest(namespace, scope, [key])
        digests.add((int(low[0]), int(high[0])))
    assert len(digests) == len(identities)


def test_the_cipher_cache_is_bounded_and_digests_do_not_depend_on_it() -> None:
    digester = Digester(SECRET)
    first = digester.digest("n", b"s", [b"key"])[0].tolist()
    for i in range(1100):
        digester.digest("n", i.to_bytes(2, "big"), [b"key"])
    assert len(digester._ciphers) == 1024
    assert digester.digest("n", b"s", [b"key"])[0].tolist() == first
    with pytest.raises(ValueError, match="1 to 256"):
        digester.digest("n", b"s", [b""])


# --- index ------------------------------------------------------------------------------------------------


@BOUNDED
@given(
    st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 39), min_size=1, max_size=12)), max_size=30),
    st.data(),
)
def test_the_index_is_a_dict_also_when_buckets_and_tags_collide(
    steps: list[tuple[bool, set[int]]], data: st.DataObject
) -> None:
    low, high = np.zeros(40, np.uint64), np.zeros(40, np.uint64)
    # Few distinct low words: the same buckets and the same tags, told apart by the high words alone.
    low[:] = data.draw(st.lists(st.sampled_from([0, 1, 1 << 63, (1 << 63) + 1]), min_size=40, max_size=40))
    high[:] = np.arange(40)
    index, model = Index(40, low, high), set()
    for add, slots in steps:
        change = sorted(slots - model if add else slots & model)
        if change:
            (index.insert if add else index.remove)(np.array(change, np.uint32))
            model = model | set(change) if add else model - set(change)
        found, held = index.find(low, high)
        assert set(np.flatnonzero(held).tolist()) == model
        assert found[held].tolist() == sorted(model)
        assert index.count == len(model)
        # One at a time goes another way, to the same end.
        alone = [index.find(low[i : i + 1], high[i : i + 1]) for i in range(40)]
        assert [bool(is_held[0]) for _, is_held in alone] == held.tolist()
        assert [int(slot[0]) for slot, is_held in alone if is_held[0]] == sorted(model)


def test_the_index_holds_its_object_limit_with_little_overflow_and_none_is_lost() -> None:
    count = 20_000
    dice = np.random.default_rng(1)
    low, high = (dice.integers(0, 2**64, count, np.uint64) for _ in range(2))
    index = Index(count, low, high)
    slots = np.arange(count, dtype=np.uint32)
    for part in np.array_split(slots, 37):
        index.insert(part)
    assert index.find(low, high)[0].tolist() == slots.tolist()
    assert 0 < index.overflow_count < count // 50
    index.remove(slots[::2])
    assert index.find(low, high)[1].tolist() == [False, True] * (count // 2)
    index.remove(slots[1::2])
    assert (index.count, index.overflow_count) == (0, 0)


# --- allocator --------------------------------------------------------------------------------------------


@BOUNDED
@given(
    st.sampled_from([50, CHUNK_AU - 1, 3 * CHUNK_AU + 17]),
    st.lists(
        st.tuples(st.lists(st.integers(0, 400), min_size=1, max_size=10), st.integers(0, 10**6)), max_size=40
    ),
)
def test_the_allocator_gives_each_unit_to_one_object_and_gets_all_back(
    capacity: int, steps: list[tuple[list[int], int]]
) -> None:
    allocator, held = Allocator(capacity), []
    for sizes, pick in steps:
        if sum(sizes) <= allocator.free_au:
            got = allocator.allocate(np.array(sizes, np.int64))
            for i, size in enumerate(sizes):
                first = [(int(got.starts[i]), int(got.counts[i]))] if got.counts[i] else []
                runs = first + got.others.get(i, [])
                if i in got.failed:
                    assert not runs
                    continue
                assert sum(count for _, count in runs) == size
                assert len(runs) <= EXTENTS_MAX
                held.append(runs)
        elif held:
            for _ in range(1 + pick % len(held)):
                gone = held.pop(pick % len(held))
                if gone:
                    runs = np.array(gone, np.int64)
                    allocator.release(runs[:, 0], runs[:, 1])
        allocator.check()
        units = [unit for runs in held for start, count in runs for unit in range(start, start + count)]
        assert len(set(units)) == len(units) == capacity - allocator.free_au
        assert sorted(units) == np.flatnonzero(allocator.taken()).tolist()


@pytest.mark.parametrize("sizes", [[1] * 16, [3, 0, 5, 8]])
def test_batches_that_do_not_fit_where_the_last_one_ended_lie_in_one_piece_where_there_is_room_enough(
    sizes: list[int],
) -> None:
    allocator = Allocator(2 * CHUNK_AU)
    allocator.allocate(np.array([2 * CHUNK_AU], np.int64))
    # As after evictions that took turns: many gaps too small for the batch, and larger ones further on.
    small, large = np.arange(0, 1000, 10, dtype=np.int64), np.arange(1000, 2 * CHUNK_AU, 40, dtype=np.int64)
    allocator.release(small, np.full_like(small, 7))
    allocator.release(large[:-2], np.full_like(large[:-2], 20))
    for _ in range(50):
        got = allocator.allocate(np.array(sizes, np.int64))
        runs = [
            (start, count)
            for start, count in zip(got.starts.tolist(), got.counts.tolist(), strict=True)
            if count
        ]
        assert not got.others
        assert [start for start, _ in runs[1:]] == [start + count for start, count in runs[:-1]]
        allocator.check()


def test_a_batch_takes_the_gaps_that_there_are_where_room_is_short() -> None:
    allocator = Allocator(CHUNK_AU)
    allocator.allocate(np.array([CHUNK_AU], np.int64))
    gaps = np.array([5, 900, 2000, 4000], np.int64)
    allocator.release(gaps, np.array([3, 4, 1, 8], np.int64))
    got = allocator.allocate(np.ones(16, np.int64))
    assert sorted(got.starts.tolist()) == [5, 6, 7, 900, 901, 902, 903, 2000, *range(4000, 4008)]
    assert allocator.free_au == 0
    allocator.check()


def test_a_large_object_in_a_fragmented_area_takes_the_longest_runs_or_is_refused() -> None:
    allocator = Allocator(CHUNK_AU)
    allocator.allocate(np.array([CHUNK_AU], np.int64))
    scattered = np.arange(0, 2000, 2, dtype=np.int64)
    allocator.release(scattered, np.ones_like(scattered))
    assert allocator.allocate(np.array([EXTENTS_MAX + 1], np.int64)).failed == [0]
    allocator.release(np.array([3000], np.int64), np.array([500], np.int64))
    got = allocator.allocate(np.array([510], np.int64))
    assert not got.failed
    assert (3000, 500) in [(int(got.starts[0]), int(got.counts[0])), *got.others[0]]
    allocator.check()


def test_units_freed_twice_are_refused() -> None:
    allocator = Allocator(10)
    allocator.allocate(np.array([4], np.int64))
    run = np.array([1], np.int64), np.array([2], np.int64)
    allocator.release(*run)
    with pytest.raises(AssertionError, match="twice"):
        allocator.release(*run)


# --- recency ----------------------------------------------------------------------------------------------


@BOUNDED
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 19), min_size=1, max_size=9)), max_size=60))
def test_the_order_of_use_is_that_of_an_ordered_dict(steps: list[tuple[bool, list[int]]]) -> None:
    recency, log = Recency(20), UseLog()
    model: OrderedDict[int, None] = OrderedDict()
    for touch, slots in steps:
        if touch:
            for slot in reversed(slots):
                model[slot] = None
                model.move_to_end(slot)
            recency.touch(log, 0, np.array(slots, np.uint32), len(model))
        else:
            for slot in slots:
                model.pop(slot, None)
            recency.forget(np.array(slots, np.uint32))
        assert recency.members(log, 0).tolist() == list(model)


def test_stale_entries_stay_fewer_than_the_live_ones_and_a_constant() -> None:
    recency, log = Recency(30_000), UseLog()
    dice = np.random.default_rng(3)
    recency.touch(log, 0, np.arange(30_000, dtype=np.uint32), 30_000)
    for _ in range(1000):
        recency.touch(log, 0, dice.integers(0, 30_000, 200).astype(np.uint32), 30_000)
        assert log.entries <= 2 * 30_000 + 2 * CHUNK_MAX + SWEEP_SLACK
        assert log.entries == sum(chunk.end - chunk.begin for chunk in log.chunks)
    order = recency.members(log, 0)
    assert (np.diff(recency.stamp_of[order].astype(np.int64)) > 0).all()
    assert len(order) == 30_000


def test_eviction_over_many_scopes_follows_the_global_order() -> None:
    world = World(capacity_au=60, max_objects=100)
    dice = np.random.default_rng(5)
    model: OrderedDict[tuple[bytes, bytes], None] = OrderedDict()
    scopes = [b"a", b"b", b"c", b"d"]
    for i in range(60):
        scope = scopes[int(dice.integers(4))]
        world.store(keys(1, f"{i}-"), scope=scope)
        model[scope, keys(1, f"{i}-")[0]] = None
    for _ in range(100):
        scope, key = list(model)[int(dice.integers(60))]
        plans = world.load([key], scope=scope)
        world.end_load([plan for plan in plans if plan is not None])
        model.move_to_end((scope, key))
    for i in range(50):
        world.store([b"new%d" % i], scope=b"z")
        (scope, key), _ = model.popitem(last=False)
        assert world.held([key], scope=scope) == [False]
        if model:
            scope, key = next(iter(model))
            assert world.held([key], scope=scope) == [True]


def test_a_scope_that_was_used_once_leaves_nothing_behind() -> None:
    world = World(capacity_au=4)
    state = world.engine._state
    audit, world.engine.audit = world.engine.audit, lambda: None  # type: ignore[method-assign]
    for i in range(1500):
        world.store([b"k"], ns=f"n{i}", scope=i.to_bytes(4, "big"))
    audit()
    assert len(state.names.homes) <= 6
    assert len(state.names.scopes) == len(state.names.namespaces) == 4
    assert len(state.recency.heap) < 800
