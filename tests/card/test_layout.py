"""The division of a card: whatever its size, the regions are apart, in order, aligned, and large enough."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xkv_gateway.card import layout
from xkv_gateway.card.format_errors import BadField, CardTooSmall
from xkv_gateway.card.layout import Layout, Region
from xkv_gateway.card.record_codec import record_bytes_max
from xkv_gateway.card.structure import BLOCK_BYTES
from xkv_gateway.card.tables import EXTENTS, NAMESPACES, OBJECTS, SCOPES

BLOCKS = st.sampled_from([512, 4096])
UNITS = st.sampled_from([1 << shift for shift in range(12, 27)])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    block_bytes, au_bytes = draw(BLOCKS), draw(UNITS)
    least = 64 << 20 if au_bytes <= 1 << 20 else 4 << 30
    blocks = draw(st.integers(least // block_bytes, (1 << 45) // block_bytes))
    size_bytes = min(blocks * block_bytes, au_bytes << 32)
    limit = draw(st.none() | st.integers(1, min(size_bytes // au_bytes, 1 << 20)))
    try:
        return layout.plan(size_bytes, block_bytes, au_bytes, limit)
    except CardTooSmall:
        return layout.plan(64 << 30, block_bytes, 1 << 16)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(layouts())
def test_regions_lie_apart_in_order_and_aligned_between_the_first_and_the_last_megabyte(card: Layout) -> None:
    layout.check(card)
    at = layout.MIB
    for region in card.regions.values():
        assert region.offset_bytes >= at
        assert region.offset_bytes % BLOCK_BYTES == region.length_bytes % BLOCK_BYTES == 0
        at = region.end_bytes
    first, second = card.superblock_offsets
    assert at <= second + BLOCK_BYTES - layout.MIB
    assert first == 0
    assert second + BLOCK_BYTES <= card.size_bytes < second + 2 * BLOCK_BYTES
    assert card.data.offset_bytes % card.au_bytes == card.data.offset_bytes % layout.MIB == 0
    assert card.data.length_bytes == card.capacity_au * card.au_bytes


@settings(derandomize=True, max_examples=150, deadline=None)
@given(layouts())
def test_a_checkpoint_of_a_full_card_fits(card: Layout) -> None:
    region_bytes = card.checkpoint_a.length_bytes
    chunk_bytes = layout.chunk_bytes_of(region_bytes)
    extents = min(card.capacity_au, 63 * card.max_objects)
    rows = (
        (OBJECTS, card.max_objects),
        (EXTENTS, extents),
        (NAMESPACES, card.max_objects),
        (SCOPES, card.max_objects),
    )
    chunks = sum(-(-count // layout.rows_per_chunk(table.row_bytes, chunk_bytes)) for table, count in rows)
    assert chunks + 2 <= layout.chunk_count_of(region_bytes)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(layouts())
def test_the_largest_record_fits_the_journal_four_times(card: Layout) -> None:
    assert 4 * record_bytes_max(card.max_objects, card.capacity_au) <= card.journal.length_bytes


@settings(derandomize=True, max_examples=80, deadline=None)
@given(BLOCKS, UNITS, st.integers(0, 64 << 20))
def test_a_tiny_card_is_refused_by_name_or_divided_rightly(
    block_bytes: int, au_bytes: int, size: int
) -> None:
    size_bytes = size // block_bytes * block_bytes
    try:
        card = layout.plan(size_bytes, block_bytes, au_bytes)
    except CardTooSmall:
        assert size_bytes < 6 * layout.MIB + (2 * layout.CAPACITY_AU_MIN + 2) * au_bytes
    else:
        assert card.capacity_au >= layout.CAPACITY_AU_MIN


def test_the_smallest_card_is_a_few_megabytes() -> None:
    with pytest.raises(CardTooSmall, match="need about"):
        layout.plan(4 << 20, 512, 64 << 10)
    assert layout.plan(16 << 20, 4096, 64 << 10).capacity_au > 100


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((1 << 30, 520, 65536), "block_bytes"),
        ((1 << 30, 512, 65537), "au_bytes"),
        ((1 << 30, 512, 2048), "au_bytes"),
        ((1 << 30, 512, 1 << 27), "au_bytes"),
        (((1 << 30) + 1, 512, 65536), "size_bytes"),
        ((1 << 30, 512, 65536, 0), "max_objects"),
        ((1 << 30, 512, 65536, (1 << 31) + 1), "max_objects"),
        ((1 << 62, 512, 4096), "au_bytes"),
    ],
)
def test_an_impossible_geometry_is_refused_by_the_name_of_the_field(
    arguments: tuple[int, ...], field: str
) -> None:
    with pytest.raises(BadField) as caught:
        layout.plan(*arguments)
    assert caught.value.field == field


def test_the_object_limit_of_a_large_card_does_not_grow_with_it() -> None:
    assert layout.plan(1 << 44, 4096, 64 << 10).max_objects == layout.OBJECTS_DEFAULT_MAX


def test_a_size_of_odd_sectors_loses_less_than_a_block() -> None:
    card = layout.plan((1 << 30) + 512 * 3, 512, 64 << 10)
    assert card.superblock_offsets[1] == (1 << 30) - 4096


CARD = layout.plan(1 << 30, 512, 64 << 10)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        (replace(CARD, journal=Region(0, CARD.journal.length_bytes)), "journal"),
        (replace(CARD, journal=Region(layout.MIB, 4096)), "journal"),
        (replace(CARD, checkpoint_b=CARD.checkpoint_a), "checkpoint_b"),
        (replace(CARD, checkpoint_a=Region(CARD.checkpoint_a.offset_bytes, 4096)), "checkpoint_a"),
        (replace(CARD, ledger_a=Region(CARD.ledger_a.offset_bytes + 1, 65536)), "ledger_a"),
        (replace(CARD, ledger_b=Region(CARD.ledger_b.offset_bytes, 0)), "ledger_b"),
        (replace(CARD, data=Region(CARD.data.offset_bytes, 1 << 40)), "data"),
        (replace(CARD, data=Region((1 << 64) - 4096, 1 << 20)), "data"),
        (replace(CARD, capacity_au=CARD.capacity_au + 1), "capacity_au"),
        (replace(CARD, capacity_au=0), "capacity_au"),
        (replace(CARD, au_bytes=0), "au_bytes"),
        (replace(CARD, block_bytes=0), "block_bytes"),
        (replace(CARD, max_objects=0), "max_objects"),
        (replace(CARD, size_bytes=0), "data"),
    ],
)
def test_a_region_table_that_no_format_wrote_is_refused_by_name(changed: Layout, field: str) -> None:
    with pytest.raises(BadField) as caught:
        layout.check(changed)
    assert caught.value.field == field
