"""Transfers of a batch: neighbours travel together, every payload byte exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xkv_gateway.card.runs import DataArea, plan_runs
from xkv_gateway.core.types import Extent

AREA = DataArea(start_bytes=1 << 20, au_bytes=8192, block_bytes=4096)
PAD = memoryview(bytes(4096))


def payload(size_bytes: int) -> memoryview:
    return memoryview(bytearray(size_bytes))


def test_neighbouring_objects_travel_as_one_run() -> None:
    objects = [(i, (Extent(10 + i, 1),), payload(8192)) for i in range(4)]
    (run,) = plan_runs(objects, AREA, PAD, 1 << 20)
    assert run.offset_bytes == (1 << 20) + 10 * 8192
    assert run.length_bytes == 4 * 8192
    assert run.members == [0, 1, 2, 3]


def test_a_run_stops_growing_at_the_limit_but_an_extent_is_never_cut() -> None:
    objects = [(0, (Extent(0, 4),), payload(4 * 8192)), (1, (Extent(4, 1),), payload(8192))]
    runs = plan_runs(objects, AREA, PAD, 8192)
    assert [run.length_bytes for run in runs] == [4 * 8192, 8192]


def test_an_object_that_does_not_fill_its_last_block_is_padded_to_the_block_only() -> None:
    (run,) = plan_runs([(0, (Extent(0, 1),), payload(100))], AREA, PAD, 1 << 20)
    assert [len(buffer) for buffer in run.buffers] == [100, 3996]
    assert run.length_bytes == 4096


def test_an_object_in_pieces_goes_to_each_of_its_extents() -> None:
    data = payload(8192 + 4097)
    runs = plan_runs([(7, (Extent(5, 1), Extent(2, 1)), data)], AREA, PAD, 1 << 20)
    assert [run.offset_bytes - (1 << 20) for run in runs] == [5 * 8192, 2 * 8192]
    assert [run.length_bytes for run in runs] == [8192, 8192]
    assert [run.members for run in runs] == [[7], [7]]


def test_an_empty_object_needs_no_transfer() -> None:
    assert plan_runs([(0, (), payload(0))], AREA, PAD, 1 << 20) == []


def test_extents_that_cannot_hold_the_payload_are_an_error_of_ours() -> None:
    with pytest.raises(AssertionError):
        plan_runs([(0, (Extent(0, 1),), payload(8193))], AREA, PAD, 1 << 20)


@settings(derandomize=True, max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, 40_000), st.integers(0, 2)), max_size=8), st.sampled_from([4096, 65536])
)
def test_every_byte_lands_where_its_extent_says(sizes_and_gaps: list[tuple[int, int]], limit: int) -> None:
    card = bytearray((1 << 20) + 200 * 8192)
    objects = []
    next_au = 0
    for index, (size_bytes, gap_au) in enumerate(sizes_and_gaps):
        next_au += gap_au
        units = -(-size_bytes // 8192)
        extents = tuple(Extent(next_au + i, 1) for i in range(units))
        next_au += units
        objects.append((index, extents, memoryview(bytes([index + 1]) * size_bytes)))
    for run in plan_runs(objects, AREA, PAD, limit):
        joined = b"".join(run.buffers)
        assert len(joined) == run.length_bytes
        assert run.length_bytes % 4096 == 0
        card[run.offset_bytes : run.offset_bytes + run.length_bytes] = joined
    for _, extents, data in objects:
        found = b"".join(
            card[AREA.start_bytes + e.start_au * 8192 : AREA.start_bytes + (e.start_au + 1) * 8192]
            for e in extents
        )
        assert found[: len(data)] == data
