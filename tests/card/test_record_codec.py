"""Records to frames and back: round trips, and whatever bytes come only `FormatError` leaves."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.card.samples import plain, records, time_records
from xkv_gateway.card.format_errors import BadField, FormatError, Truncated
from xkv_gateway.card.journal_format import Ring
from xkv_gateway.card.layout import JOURNAL_BYTES_MIN
from xkv_gateway.card.record_codec import (
    FRAME_HEADER,
    RecordKind,
    decode_records,
    encode_batches,
    encode_record,
    record_bytes_max,
)
from xkv_gateway.card.tables import EXTENTS_PER_OBJECT_MAX
from xkv_gateway.core.records import (
    RECORD_OBJECTS_MAX,
    RESERVED_OBJECTS_MAX,
    DeleteBatch,
    DeleteCause,
    FreedBatch,
    NamespaceNamed,
    PutBatch,
    Record,
    ScopeNamed,
    WipeRecord,
)
from xkv_gateway.core.types import Lsn

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
SLOTTED = st.lists(st.tuples(U32, U32), max_size=30)
NAMES = st.text(max_size=16)
SCOPES = st.binary(max_size=32)
RULES = settings(derandomize=True, max_examples=120, deadline=None)


def u32(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.array(values, np.uint32)


@st.composite
def puts(draw: st.DrawFn) -> PutBatch:
    rows = draw(st.lists(st.tuples(U64, U64, U64, U32, U32, U32, U32, U32, st.integers(0, 64)), max_size=12))
    columns = [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(9)]
    wide = [np.array(column, np.uint64) for column in columns[:3]]
    narrow = [u32(column) for column in columns[3:8]]
    extents = sum(columns[8])
    run = draw(st.integers(0, 2**32 - 1 - 64 * 12))
    starts = u32([run + i for i in range(extents)])
    return PutBatch(
        Lsn(0), narrow[0], narrow[1], wide[0], wide[1], narrow[2], narrow[3], narrow[4], wide[2],
        np.array(columns[8], np.uint8), starts, starts,
    )  # fmt: skip


RECORDS = st.one_of(
    puts(),
    st.builds(
        lambda rows, cause: DeleteBatch(Lsn(0), cause, u32([r[0] for r in rows]), u32([r[1] for r in rows])),
        SLOTTED,
        st.sampled_from(DeleteCause),
    ),
    st.builds(lambda rows: FreedBatch(Lsn(0), u32([r[0] for r in rows]), u32([r[1] for r in rows])), SLOTTED),
    st.builds(NamespaceNamed, st.just(Lsn(0)), U32, NAMES),
    st.builds(ScopeNamed, st.just(Lsn(0)), U32, SCOPES),
    st.builds(WipeRecord, st.just(Lsn(0)), NAMES, st.none() | SCOPES),
)


def numbered(made: list[Record], first_lsn: int) -> list[Record]:
    for index, record in enumerate(made):
        object.__setattr__(record, "lsn", Lsn(first_lsn + index))
    return made


def put_of(count: int, extents: int) -> PutBatch:
    names = ("digests_low", "digests_high", "checksums")
    wide = {name: np.zeros(count, np.uint64) for name in names}
    names = ("generations", "namespace_ids", "scope_ids", "sizes_bytes")
    narrow = {name: np.ones(count, np.uint32) for name in names}
    return PutBatch(
        lsn=Lsn(0),
        slots=np.arange(count, dtype=np.uint32),
        extent_counts=np.full(count, extents, np.uint8),
        extent_starts_au=np.zeros(count * extents, np.uint32),
        extent_counts_au=np.ones(count * extents, np.uint32),
        **wide,
        **narrow,
    )


@pytest.mark.parametrize("count", [1, RESERVED_OBJECTS_MAX, RESERVED_OBJECTS_MAX + 1, 2000])
@pytest.mark.parametrize("extents", [1, EXTENTS_PER_OBJECT_MAX])
@pytest.mark.parametrize("before", [0, 1, 1000])
def test_no_batch_is_larger_than_it_may_be_whatever_belongs_together(
    count: int, extents: int, before: int
) -> None:
    put = put_of(count, extents)
    generations = np.ones(count, np.uint32)
    delete = DeleteBatch(Lsn(0), DeleteCause.DELETED, put.slots, generations)
    limit = max(len(encode_record(put)) + 64, Ring(JOURNAL_BYTES_MIN).body_bytes_max)
    freed: list[Record] = [FreedBatch(Lsn(0), put.slots[:1], generations[:1]) for _ in range(before)]
    batches = encode_batches(numbered([*freed, put, delete], 1), limit)
    assert all(len(batch.body) <= limit for batch in batches)
    of_put, of_delete = (
        next(n for n, batch in enumerate(batches) if batch.first_lsn <= lsn <= batch.last_lsn)
        for lsn in (before + 1, before + 2)
    )
    assert of_put == of_delete or count > RESERVED_OBJECTS_MAX


@RULES
@given(st.lists(RECORDS, max_size=8), st.integers(1, 2**63), st.sampled_from([8 << 10, 1 << 20]))
def test_any_records_come_back_as_they_were(made: list[Record], first_lsn: int, limit: int) -> None:
    made = numbered(made, first_lsn)
    found: list[Record] = []
    for batch in encode_batches(made, limit):
        assert len(batch.body) <= limit
        assert batch.first_lsn == first_lsn + len(found)
        found += decode_records(batch.body, batch.first_lsn, batch.last_lsn - batch.first_lsn + 1)
        assert batch.last_lsn == first_lsn + len(found) - 1
    assert list(map(plain, found)) == list(map(plain, made))


def test_records_of_times_come_back() -> None:
    (batch,) = encode_batches(time_records(7), 1 << 20)
    decoded = decode_records(batch.body, 7, 5)
    assert list(map(plain, decoded)) == list(map(plain, time_records(7)))


def test_one_of_each_kind_comes_back() -> None:
    (batch,) = encode_batches(records(41), 1 << 20)
    assert (batch.first_lsn, batch.last_lsn) == (41, 53)
    assert list(map(plain, decode_records(batch.body, 41, 13))) == list(map(plain, records(41)))
    assert len(batch.body) % 8 == 0


def test_the_largest_record_is_as_large_as_the_layout_believes() -> None:
    n = RECORD_OBJECTS_MAX
    many, wide = np.zeros(n, np.uint32), np.zeros(n, np.uint64)
    extents = np.zeros(64 * n, np.uint32)
    put = PutBatch(
        Lsn(1), many, many, wide, wide, many, many, many, wide, np.full(n, 64, np.uint8), extents, extents
    )
    assert len(encode_record(put)) <= record_bytes_max(10_000_000, 1 << 32)


def test_a_decoded_array_cannot_be_written_to() -> None:
    (batch,) = encode_batches(records(), 1 << 20)
    put = decode_records(bytearray(batch.body), 1, 13)[2]
    assert isinstance(put, PutBatch)
    with pytest.raises(ValueError, match="read-only"):
        put.slots[0] = 9


@pytest.mark.parametrize(
    ("frame", "error", "field"),
    [
        (FRAME_HEADER.pack(99, 0, 0, 0, 24, 1), BadField, "kind"),
        (FRAME_HEADER.pack(RecordKind.FREED, 1, 0, 0, 24, 1), BadField, "flags"),
        (FRAME_HEADER.pack(RecordKind.DELETE, 77, 0, 0, 24, 1), BadField, "flags"),
        (FRAME_HEADER.pack(RecordKind.FREED, 0, 0, 0, 24, 2), BadField, "lsn"),
        (FRAME_HEADER.pack(RecordKind.FREED, 0, 0, 0, 16, 1), BadField, "frame_bytes"),
        (FRAME_HEADER.pack(RecordKind.FREED, 0, 0, 0, 25, 1), BadField, "frame_bytes"),
        (FRAME_HEADER.pack(RecordKind.FREED, 0, 0, 0, 32, 1), Truncated, "frame_bytes"),
        (FRAME_HEADER.pack(RecordKind.FREED, 0, 2**32 - 1, 0, 32, 1) + bytes(8), Truncated, "count"),
        (FRAME_HEADER.pack(RecordKind.FREED, 0, 0, 0, 32, 1) + bytes(8), BadField, "frame_bytes"),
        (FRAME_HEADER.pack(RecordKind.PUT, 0, 0, 1, 32, 1) + bytes(8), BadField, "extents"),
        (FRAME_HEADER.pack(RecordKind.NAMESPACE, 0, 4, 0, 32, 1) + bytes(4) + b"\xff" * 4, BadField, "name"),
        (FRAME_HEADER.pack(RecordKind.SCOPE, 0, 33, 0, 64, 1) + bytes(40), BadField, "name"),
        (FRAME_HEADER.pack(RecordKind.WIPE, 1, 0, 1, 32, 1) + bytes(8), BadField, "flags"),
        (b"\x01" * 23, Truncated, ""),
    ],
)
def test_a_frame_that_no_gateway_writes_is_refused(
    frame: bytes, error: type[FormatError], field: str
) -> None:
    with pytest.raises(error) as caught:
        decode_records(frame, 1, 1)
    assert caught.value.field == field


def test_a_batch_with_another_number_of_records_than_it_says_is_refused() -> None:
    (batch,) = encode_batches(records(), 1 << 20)
    for count in (6, 8):
        with pytest.raises(BadField, match="count"):
            decode_records(batch.body, 1, count)


@RULES
@given(st.binary(max_size=200))
def test_garbage_is_only_ever_a_format_error(garbage: bytes) -> None:
    with suppress(FormatError):
        decode_records(garbage, 1, 1)


def test_every_flipped_byte_and_every_cut_of_a_body_is_survived_or_a_format_error() -> None:
    (batch,) = encode_batches(records(), 1 << 20)
    for at in range(len(batch.body)):
        for mask in (0x01, 0x80, 0xFF):
            flipped = bytearray(batch.body)
            flipped[at] ^= mask
            with suppress(FormatError):
                decode_records(flipped, 1, 13)
        with pytest.raises(FormatError):
            decode_records(batch.body[:at], 1, 13)
