"""Checkpoints and ledgers: whole arrays in and out, valid only when closed, damage confined to its chunk."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.card.samples import ALL_TABLES, CARD, OTHER_CARD, REGION_BYTES, RUN, columns, identity, named
from xkv_gateway.card.format_errors import (
    BadChecksum,
    BadMagic,
    ForeignCard,
    FormatError,
    Incomplete,
    NoRoom,
    StaleWrite,
)
from xkv_gateway.card.layout import chunk_bytes_of, chunk_count_of, ledger_rows_max, rows_per_chunk
from xkv_gateway.card.structure import crc_of
from xkv_gateway.card.table_file import CLOSING, FileIdentity, FileKind, TableWriter
from xkv_gateway.card.table_read import Chunk, FileFacts, TableReader, by_age, decode_ends
from xkv_gateway.card.tables import (
    EXTENTS,
    NAMESPACES,
    OBJECTS,
    QUOTAS,
    SCOPES,
    TABLES,
    WIPES,
    ObjectState,
    unpack_names,
)
from xkv_gateway.core import image

if TYPE_CHECKING:
    from collections.abc import Iterable

    from xkv_gateway.card.table_file import Piece
    from xkv_gateway.card.tables import Columns, Table

Rows = list[tuple["Table", "Columns"]]


def put(region: bytearray, pieces: Iterable[Piece]) -> None:
    for piece in pieces:
        assert piece.offset_bytes % 4096 == len(piece.data) % 4096 == 0
        assert len(piece.data) <= chunk_bytes_of(len(region))
        region[piece.offset_bytes : piece.offset_bytes + len(piece.data)] = piece.data


def written(rows: Rows, region: bytearray | None = None, which: FileIdentity | None = None) -> bytearray:
    region = bytearray(REGION_BYTES) if region is None else region
    writer = TableWriter(len(region), which or identity())
    put(region, writer.open_pieces())
    for table, values in rows:
        put(region, writer.chunks(table, values))
    put(region, [writer.close(end_lsn=20, used_stamp_max=77, generation_max=9)])
    return region


def facts_of(region: bytearray, kind: FileKind = FileKind.CHECKPOINT, card: bytes = CARD) -> FileFacts | None:
    return decode_ends(region[:4096], region[-4096:], region_bytes=len(region), card_uuid=card, kind=kind)


def read(region: bytearray) -> tuple[TableReader, list[Chunk]]:
    facts = facts_of(region)
    assert facts is not None
    reader = TableReader(len(region), facts)
    chunks = [reader.decode(region[at : at + size]) for at, size in reader.ranges()]
    return reader, [chunk for chunk in chunks if chunk is not None]


def joined(chunks: list[Chunk], table: Table) -> Columns:
    mine = [chunk for chunk in chunks if chunk.table is table]
    assert [chunk.first_row for chunk in mine] == np.cumsum([0, *[c.rows for c in mine]])[
        : len(mine)
    ].tolist()
    return {c.name: np.concatenate([chunk.columns[c.name] for chunk in mine]) for c in table.columns}


def assert_same(found: Columns, expected: Columns) -> None:
    assert list(found) == list(expected)
    for name, values in expected.items():
        assert found[name].tobytes() == values.tobytes(), name


def test_every_table_comes_back_as_it_was() -> None:
    rows: Rows = [(table, columns(table, 1100)) for table in ALL_TABLES]
    reader, chunks = read(written(rows))
    reader.finish()
    for table, values in rows:
        assert_same(joined(chunks, table), values)
    totals = facts_of(written(rows))
    assert totals is not None
    assert totals.identity == identity()
    assert (totals.totals.end_lsn, totals.totals.used_stamp_max, totals.totals.generation_max) == (20, 77, 9)
    assert totals.totals.rows == {table.ident: 1100 for table in ALL_TABLES}


def test_rows_may_come_in_any_portions_and_tables_in_any_order() -> None:
    values, extents = columns(OBJECTS, 3000), columns(EXTENTS, 10)
    parts: Rows = []
    for first, last in ((0, 1), (1, 1), (1, 2000), (2000, 3000)):
        parts.append((OBJECTS, {name: array[first:last] for name, array in values.items()}))
        parts.append((EXTENTS, extents))
    reader, chunks = read(written(parts))
    reader.finish()
    assert_same(joined(chunks, OBJECTS), values)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(ALL_TABLES), st.integers(0, 1200)), max_size=6),
    st.integers(1, 2**62 - 1),
)
def test_whatever_is_closed_is_read_back(portions: list[tuple[Table, int]], sequence: int) -> None:
    rows: Rows = [(table, columns(table, count, seed)) for seed, (table, count) in enumerate(portions)]
    reader, chunks = read(written(rows, which=identity(sequence)))
    reader.finish()
    expected = [(table, values) for table, values in rows if len(values[table.columns[0].name])]
    at = 0
    for table, values in expected:
        count = len(values[table.columns[0].name])
        mine: list[Chunk] = []
        while sum(chunk.rows for chunk in mine) < count:
            mine.append(chunks[at])
            at += 1
        assert_same(
            {c.name: np.concatenate([m.columns[c.name] for m in mine]) for c in table.columns}, values
        )


def test_values_that_do_not_fit_their_column_are_refused_not_cut() -> None:
    values = columns(OBJECTS, 4) | {"size_bytes": np.zeros(4, np.uint64)}
    with pytest.raises(TypeError):
        list(TableWriter(REGION_BYTES, identity()).chunks(OBJECTS, values))


def test_a_region_never_written_holds_nothing() -> None:
    assert facts_of(bytearray(REGION_BYTES)) is None


def test_a_file_that_is_not_closed_is_incomplete_at_every_step() -> None:
    region = bytearray(REGION_BYTES)
    old: Rows = [(OBJECTS, columns(OBJECTS, 2500))]
    written(old, region)
    writer = TableWriter(REGION_BYTES, identity(sequence=6))
    opened = writer.open_pieces()
    assert [(piece.offset_bytes, any(piece.data)) for piece in opened] == [
        (0, True),
        (REGION_BYTES - 4096, False),
    ]
    steps = [*opened, *writer.chunks(OBJECTS, columns(OBJECTS, 2500, seed=2))]
    for piece in steps:
        put(region, [piece])
        with pytest.raises(Incomplete):
            facts_of(region)
    put(region, [writer.close(20)])
    facts = facts_of(region)
    assert facts is not None
    assert facts.identity.sequence == 6


def test_a_closing_block_that_arrived_before_a_chunk_is_found_out_by_the_chunk() -> None:
    region = bytearray(REGION_BYTES)
    written([(OBJECTS, columns(OBJECTS, 2500))], region)
    writer = TableWriter(REGION_BYTES, identity(sequence=6))
    put(region, writer.open_pieces())
    pieces = list(writer.chunks(OBJECTS, columns(OBJECTS, 2500, seed=2)))
    put(region, [pieces[0], *pieces[2:], writer.close(20)])
    reader, chunks = read(region)
    assert len(chunks) == len(pieces) - 1
    assert [type(error) for error in reader.damaged] == [StaleWrite]
    with pytest.raises(Incomplete):
        reader.finish()


def test_ends_of_two_files_do_not_belong_together() -> None:
    rows: Rows = [(OBJECTS, columns(OBJECTS, 10))]
    one, other = written(rows), written(rows, which=identity(sequence=6))
    later_run = written(rows, which=replace(identity(), stamp=replace(RUN, epoch=9)))
    for mixed in (other, later_run):
        with pytest.raises(Incomplete):
            facts_of(bytearray(one[:4096] + mixed[4096:]))


def test_files_of_another_card_or_kind_are_refused() -> None:
    region = written([(QUOTAS, columns(QUOTAS, 5))])
    with pytest.raises(ForeignCard):
        facts_of(region, card=OTHER_CARD)
    with pytest.raises(FormatError, match="kind"):
        facts_of(region, kind=FileKind.LEDGER)


def test_damage_costs_the_chunk_that_it_hit_and_no_other() -> None:
    values = columns(OBJECTS, 4000)
    whole = written([(OBJECTS, values)])
    step, stride = (
        rows_per_chunk(OBJECTS.row_bytes, chunk_bytes_of(REGION_BYTES)),
        chunk_bytes_of(REGION_BYTES),
    )
    for victim in (0, 1, 3):
        for offset in (0, 20, 60, 127, 128, 5000, stride - 4096):
            region = bytearray(whole)
            region[4096 + victim * stride + offset] ^= 0x40
            reader, chunks = read(region)
            if len(chunks) == 4:  # behind the last row there is nothing to be damaged
                reader.finish()
                continue
            assert [chunk.index for chunk in chunks] == [i for i in range(4) if i != victim]
            assert all(chunk.first_row == chunk.index * step for chunk in chunks)
            assert len(reader.damaged) == 1
            with pytest.raises(Incomplete):
                reader.finish()


def test_a_chunk_at_the_place_of_another_is_refused() -> None:
    region = written([(OBJECTS, columns(OBJECTS, 4000))])
    stride = chunk_bytes_of(REGION_BYTES)
    region[4096 : 4096 + stride] = region[4096 + stride : 4096 + 2 * stride]
    reader, chunks = read(region)
    assert [chunk.index for chunk in chunks] == [1, 2, 3]
    assert "index" in str(reader.damaged[0])


def test_an_older_whole_chunk_of_the_same_file_number_is_found_out_at_the_end() -> None:
    """The same run wrote the file twice under one number, and one chunk of the first attempt is left."""
    first, second = (written([(OBJECTS, columns(OBJECTS, 4000, seed))]) for seed in (1, 2))
    stride = chunk_bytes_of(REGION_BYTES)
    second[4096 : 4096 + stride] = first[4096 : 4096 + stride]
    reader, chunks = read(second)
    assert len(chunks) == 4
    with pytest.raises(BadChecksum):
        reader.finish()


def test_row_counts_that_a_faulty_program_closed_are_found_out() -> None:
    region = written([(OBJECTS, columns(OBJECTS, 10))])
    field = next(field for field in CLOSING.fields if field.name == "rows_1")
    closing = bytearray(region[-4096:])
    closing[field.offset] += 1
    closing[12:16] = crc_of(closing).to_bytes(4, "little")
    region[-4096:] = closing
    reader, _ = read(region)
    with pytest.raises(Incomplete, match="row counts"):
        reader.finish()


def test_the_newest_closed_file_comes_first() -> None:
    files = [facts_of(written([], which=identity(sequence))) for sequence in (4, 7, 5)]
    assert by_age(files) == [1, 2, 0]
    assert by_age([None, files[0]]) == [1]
    assert by_age([None, None]) == []


def test_a_file_that_outgrows_its_region_says_so() -> None:
    region_bytes = 2 * 4096 + 3 * (64 << 10)
    writer = TableWriter(region_bytes, identity())
    with pytest.raises(NoRoom):
        list(writer.chunks(OBJECTS, columns(OBJECTS, 5000)))


def test_a_ledger_holds_the_rows_that_it_promises() -> None:
    region_bytes = 256 << 10
    count = ledger_rows_max(region_bytes)
    region = bytearray(region_bytes)
    which = identity(kind=FileKind.LEDGER)
    rows: Rows = [(WIPES, columns(WIPES, count // 3)), (QUOTAS, columns(QUOTAS, count - count // 3))]
    written(rows, region, which)
    facts = facts_of(region, FileKind.LEDGER)
    assert facts is not None
    assert facts.totals.chunks <= chunk_count_of(region_bytes)


def test_names_come_back_byte_by_byte() -> None:
    names = [b"", b"\0", b"\0\0", b"a", b"a\0", "ä".encode(), b"x" * 32]
    for table in (NAMESPACES, SCOPES):
        reader, (chunk,) = read(written([(table, named(names, table))]))
        reader.finish()
        assert unpack_names(chunk.columns["name"], chunk.columns["name_bytes"]) == names
    with pytest.raises(ValueError, match="at most"):
        named([b"x" * 65], NAMESPACES)


def test_tables_keep_their_numbers_and_need_no_padding() -> None:
    assert {ident: table.name for ident, table in TABLES.items()} == {
        1: "objects", 2: "extents", 3: "namespaces", 4: "scopes", 5: "wipes", 6: "quotas",
        7: "lives", 8: "clock",
    }  # fmt: skip
    assert OBJECTS.row_bytes == 64


def test_the_states_of_rows_are_those_that_the_engine_writes() -> None:
    assert (ObjectState.LIVE, ObjectState.DOOMED, ObjectState.QUARANTINED) == (
        image.ROW_LIVE,
        image.ROW_DOOMED,
        image.ROW_QUARANTINED,
    )


def test_garbage_at_either_end_is_a_format_error() -> None:
    region = written([])
    with pytest.raises(BadMagic):
        facts_of(bytearray(b"\x77" * 4096 + region[4096:]))
    with pytest.raises(BadMagic):
        facts_of(bytearray(region[:-4096] + b"\x77" * 4096))
