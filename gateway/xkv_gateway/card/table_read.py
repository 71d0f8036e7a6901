"""Reads table files: judges a region by its two ends, then decodes chunk by chunk, damaged ones apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from crc32c import crc32c

from xkv_gateway.card.format_errors import (
    BadChecksum,
    BadField,
    ForeignCard,
    FormatError,
    Incomplete,
    StaleWrite,
    Truncated,
)
from xkv_gateway.card.journal_format import ChainPoint
from xkv_gateway.card.layout import CHUNK_HEADER_BYTES, chunk_bytes_of, chunk_count_of
from xkv_gateway.card.structure import BLOCK_BYTES, align_up, is_blank
from xkv_gateway.card.table_file import (
    CHUNK,
    CLOSING,
    FILE_HEADER,
    FileIdentity,
    FileKind,
    Totals,
    add_chunk,
)
from xkv_gateway.card.tables import TABLES, TABLES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from xkv_gateway.card.structure import Bytes, Stamp
    from xkv_gateway.card.tables import Columns, Table

_GENERATION_LIMIT: Final = 1 << 32


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of a table. The columns are read-only views of the bytes that were decoded."""

    index: int
    table: Table
    first_row: int
    rows: int
    columns: Columns


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A closed file: its two ends belong together. Whether its chunks are whole only reading them tells."""

    identity: FileIdentity
    totals: Totals


def decode_ends(
    header: Bytes,
    closing: Bytes,
    *,
    region_bytes: int,
    card_uuid: bytes,
    kind: FileKind,
) -> FileFacts | None:
    """Judge the first and the last 4 KiB of a region.

    Returns:
        The facts, or None where nothing was ever written.

    Raises:
        Incomplete: begun and never closed, or the ends are of two files.
        FormatError: anything else that a structure can have: Truncated, BadMagic, BadChecksum, UnknownVersion, BadField,
            ForeignCard.
    """
    if min(len(header), len(closing)) >= BLOCK_BYTES:
        if is_blank(header) and is_blank(closing):
            return None
        if is_blank(closing):
            raise Incomplete(CLOSING.name, "", "the file was never closed")
    header_stamp, opened = FILE_HEADER.unpack(header)
    closing_stamp, closed = CLOSING.unpack(closing)
    for structure, stamp, values in ((FILE_HEADER, header_stamp, opened), (CLOSING, closing_stamp, closed)):
        if stamp.card_uuid != card_uuid:
            raise ForeignCard(structure.name, "card_uuid", "a file of another card")
        structure.require(values["kind"] == kind, "kind", f"{values['kind']} instead of {kind.value}")
    if (
        header_stamp != closing_stamp
        or opened["sequence"] != closed["sequence"]
        or opened["crc"] != closed["header_crc"]
    ):
        raise Incomplete(CLOSING.name, "sequence", "header and closing block are of two files")
    FILE_HEADER.require(
        opened["chunk_bytes"] == chunk_bytes_of(region_bytes), "chunk_bytes", "not of this region"
    )
    CLOSING.require(closed["chunks"] <= chunk_count_of(region_bytes), "chunks", "more than the region holds")
    CLOSING.require(closed["generation_max"] < _GENERATION_LIMIT, "generation_max", "not possible")
    start = ChainPoint(
        opened["start_position"],
        opened["start_number"],
        opened["start_lsn"],
        opened["start_chain"],
        opened["start_epoch"],
        opened["start_run_id"],
    )
    FILE_HEADER.require(start.position % BLOCK_BYTES == 0, "start_position", "not aligned")
    CLOSING.require(closed["end_lsn"] >= start.next_lsn - 1, "end_lsn", "before the start")
    return FileFacts(FileIdentity(header_stamp, kind, opened["sequence"], start), _totals(closed))


def _totals(closed: dict[str, int]) -> Totals:
    rows = {ident: closed[f"rows_{ident}"] for ident in range(TABLES_MAX) if closed[f"rows_{ident}"]}
    unknown = sorted(set(rows) - set(TABLES))
    CLOSING.require(not unknown, f"rows_{unknown[0] if unknown else 0}", "rows of an unknown table")
    return Totals(
        closed["chunks"],
        closed["end_lsn"],
        closed["used_stamp_max"],
        closed["generation_max"],
        closed["content_crc"],
        rows,
    )


def by_age(files: Sequence[FileFacts | None]) -> list[int]:
    """Return the indexes of the closed files, the newest first."""
    closed = [(facts.identity.sequence, index) for index, facts in enumerate(files) if facts is not None]
    return [index for _, index in sorted(closed, reverse=True)]


class TableReader:
    """Decodes the chunks of a closed file, and checks at the end that nothing was missing."""

    def __init__(self, region_bytes: int, facts: FileFacts) -> None:
        self._facts = facts
        self._chunk_bytes = chunk_bytes_of(region_bytes)
        self._content_crc = 0
        self._rows: dict[int, int] = {}
        self._next = 0
        self.damaged: list[FormatError] = []
        """What could not be decoded. The rows of these chunks are lost; none of the others is affected."""

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield offset and length of each chunk's place in the region, in order; read them in turn."""
        for index in range(self._facts.totals.chunks):
            yield BLOCK_BYTES + index * self._chunk_bytes, self._chunk_bytes

    def decode(self, data: Bytes) -> Chunk | None:
        """Decode the next chunk from the bytes of its place; None (and an entry in `damaged`) if it is damaged."""
        index, self._next = self._next, self._next + 1
        assert index < self._facts.totals.chunks
        try:
            return self._decode(index, memoryview(data).toreadonly())
        except FormatError as error:
            self.damaged.append(error)
            return None

    def _decode(self, index: int, data: memoryview) -> Chunk:
        stamp, values = CHUNK.unpack(data)
        self._check_belongs(stamp, values, index)
        table = TABLES.get(values["table"])
        if table is None:
            raise BadField(CHUNK.name, "table", f"unknown table {values['table']}")
        rows, body_bytes = values["rows"], values["body_bytes"]
        CHUNK.require(values["row_bytes"] == table.row_bytes, "row_bytes", f"not those of {table.name}")
        CHUNK.require(body_bytes == rows * table.row_bytes, "body_bytes", "not what the rows take")
        end = align_up(CHUNK_HEADER_BYTES + body_bytes)
        CHUNK.require(end <= self._chunk_bytes, "body_bytes", "more than a chunk holds")
        if len(data) < end:
            raise Truncated(CHUNK.name, "", f"{len(data)} of {end} bytes")
        if crc32c(data[CHUNK_HEADER_BYTES:end]) != values["body_crc"]:
            raise BadChecksum(CHUNK.name, "body_crc", f"chunk {index} is damaged")
        self._content_crc = add_chunk(self._content_crc, data, values["body_crc"])
        self._rows[table.ident] = self._rows.get(table.ident, 0) + rows
        columns: Columns = {}
        at = CHUNK_HEADER_BYTES
        for column in table.columns:
            columns[column.name] = np.frombuffer(data, column.dtype, rows, at)
            at += rows * column.width_bytes
        return Chunk(index, table, values["first_row"], rows, columns)

    def _check_belongs(self, stamp: Stamp, values: dict[str, int], index: int) -> None:
        identity = self._facts.identity
        if stamp.card_uuid != identity.stamp.card_uuid:
            raise ForeignCard(CHUNK.name, "card_uuid", "a chunk of another card")
        if stamp != identity.stamp or values["sequence"] != identity.sequence:
            raise StaleWrite(CHUNK.name, "sequence", "a chunk of another file")
        CHUNK.require(values["kind"] == identity.kind, "kind", "a chunk of another kind of file")
        CHUNK.require(values["index"] == index, "index", f"{values['index']} where chunk {index} belongs")

    def finish(self) -> None:
        """Check that the chunks were all there, and were those that were closed.

        Raises:
            BadChecksum, Incomplete: they were not. What `decode` returned is whole all the same.
        """
        totals = self._facts.totals
        if self.damaged or self._next != totals.chunks:
            raise Incomplete(
                CLOSING.name, "chunks", f"{len(self.damaged)} of {totals.chunks} chunks are damaged"
            )
        if self._content_crc != totals.content_crc:
            raise BadChecksum(CLOSING.name, "content_crc", "other chunks than those that were closed")
        if self._rows != totals.rows:
            raise Incomplete(CLOSING.name, "rows", "other row counts than those that were closed")
