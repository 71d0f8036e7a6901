"""Table files: the container of checkpoints and ledgers. Written piece by piece, valid only when closed.

    | header 4 KiB | chunk 0 | chunk 1 | ... | nothing | closing block 4 KiB |

A chunk holds some rows of one table, column after column, under a header of its own, and begins at a multiple of
`chunk_bytes`, so that a reader finds every chunk whatever became of the one before. The closing block is the last block
of the region. It counts the chunks and the rows and carries a checksum over all chunk checksums.

Order of writes: `open_pieces` (new header, closing block zeroed), flush; chunks in any order, flush; `close`, flush. So at
any moment the region holds either a whole file, or one whose two ends do not belong together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Final

import numpy as np
from crc32c import crc32c

from xkv_gateway.card.format_errors import NoRoom
from xkv_gateway.card.layout import CHUNK_HEADER_BYTES, chunk_bytes_of, chunk_count_of, rows_per_chunk
from xkv_gateway.card.structure import BLOCK_BYTES, RUN_ID_BYTES, Stamp, Structure, align_up
from xkv_gateway.card.tables import TABLES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xkv_gateway.card.journal_format import ChainPoint
    from xkv_gateway.card.structure import Bytes
    from xkv_gateway.card.tables import Columns, Table


class FileKind(IntEnum):
    """What a table file is."""

    CHECKPOINT = 1
    LEDGER = 2


FILE_HEADER: Final = Structure(
    "table_header",
    b"XKVTABLE",
    BLOCK_BYTES,
    (
        ("u64", "sequence"),
        ("u32", "kind"),
        ("u32", "chunk_bytes"),
        ("u64", "start_position"),
        ("u64", "start_number"),
        ("u64", "start_lsn"),
        ("u64", "start_chain"),
        ("u64", "start_epoch"),
        (f"bytes[{RUN_ID_BYTES}]", "start_run_id"),
    ),
)
CHUNK: Final = Structure(
    "table_chunk",
    b"XKVCHUNK",
    CHUNK_HEADER_BYTES,
    (
        ("u64", "sequence"),
        ("u32", "kind"),
        ("u32", "index"),
        ("u32", "table"),
        ("u32", "rows"),
        ("u32", "row_bytes"),
        ("u32", "body_bytes"),
        ("u64", "first_row"),
        ("u32", "body_crc"),
        ("zero[4]", ""),
    ),
)
CLOSING: Final = Structure(
    "table_closing",
    b"XKVCLOSE",
    BLOCK_BYTES,
    (
        ("u64", "sequence"),
        ("u32", "kind"),
        ("u32", "chunks"),
        ("u64", "end_lsn"),
        ("u64", "used_stamp_max"),
        ("u64", "generation_max"),
        ("u32", "content_crc"),
        ("u32", "header_crc"),
        *(("u64", f"rows_{ident}") for ident in range(TABLES_MAX)),
    ),
)
CHUNK_CRC_BYTES: Final = 8
"""What a chunk adds to the content checksum: its header's CRC and its body's."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes to write, in one transfer, at an offset of the region. Multiples of 4 KiB."""

    offset_bytes: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Which table file this is."""

    stamp: Stamp
    kind: FileKind
    sequence: int
    """Counts the files of a kind; the newest closed one wins. It goes to the region that the newest is not in."""
    start: ChainPoint
    """Replay begins here: every change that the file may lack has an LSN from `start.next_lsn` on."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What the closing block says."""

    chunks: int
    end_lsn: int
    """The last record that any row may already show."""
    used_stamp_max: int
    generation_max: int
    """The largest ever given to an object: a slot that is absent has no row that tells."""
    content_crc: int
    rows: dict[int, int] = field(default_factory=dict)
    """By table."""


class TableWriter:
    """Encodes one table file.

    The caller passes columns of any length, as often as it likes: rows of one call are consistent among themselves,
    as far as they were when it was called.

    Args:
        region_bytes: length of the region.
        identity: of the new file.
    """

    def __init__(self, region_bytes: int, identity: FileIdentity) -> None:
        self._region_bytes = region_bytes
        self._identity = identity
        self._chunk_bytes = chunk_bytes_of(region_bytes)
        self._chunks_max = chunk_count_of(region_bytes)
        self._chunks = 0
        self._rows: dict[int, int] = {}
        self._content_crc = 0
        self._header = _encode_header(identity, self._chunk_bytes)

    def open_pieces(self) -> tuple[Piece, Piece]:
        """Return what is written first, and flushed before any chunk: it makes the file that was here invalid."""
        zeroes = memoryview(bytes(BLOCK_BYTES))
        return Piece(0, memoryview(self._header)), Piece(self._region_bytes - BLOCK_BYTES, zeroes)

    def chunks(self, table: Table, columns: Columns) -> Iterator[Piece]:
        """Encode rows of a table: yields one piece a chunk, at most `chunk_bytes` long. Copies each value once.

        Raises:
            NoRoom: the file outgrew its region; give it up and begin anew.
        """
        rows = len(columns[table.columns[0].name])
        step = rows_per_chunk(table.row_bytes, self._chunk_bytes)
        for first in range(0, rows, step):
            yield self._chunk(table, columns, first, min(rows, first + step))

    def _chunk(self, table: Table, columns: Columns, first: int, last: int) -> Piece:
        if self._chunks == self._chunks_max:
            raise NoRoom(FILE_HEADER.name, "chunks", f"more than {self._chunks_max} chunks")
        rows = last - first
        body_bytes = rows * table.row_bytes
        buffer = bytearray(align_up(CHUNK_HEADER_BYTES + body_bytes))
        at = CHUNK_HEADER_BYTES
        for column in table.columns:
            place = np.frombuffer(buffer, column.dtype, rows, at)
            # `safe`: a value that does not fit its column is the caller's error, never cut off.
            np.copyto(place, columns[column.name][first:last], casting="safe")
            at += place.nbytes
        view = memoryview(buffer)
        body_crc = crc32c(view[CHUNK_HEADER_BYTES:])
        header = CHUNK.pack(
            self._identity.stamp,
            {
                "sequence": self._identity.sequence,
                "kind": self._identity.kind,
                "index": self._chunks,
                "table": table.ident,
                "rows": rows,
                "row_bytes": table.row_bytes,
                "body_bytes": body_bytes,
                "first_row": self._rows.get(table.ident, 0),
                "body_crc": body_crc,
            },
        )
        view[:CHUNK_HEADER_BYTES] = header
        self._content_crc = add_chunk(self._content_crc, header, body_crc)
        self._rows[table.ident] = self._rows.get(table.ident, 0) + rows
        offset = BLOCK_BYTES + self._chunks * self._chunk_bytes
        self._chunks += 1
        return Piece(offset, view.toreadonly())

    def close(self, end_lsn: int, used_stamp_max: int = 0, generation_max: int = 0) -> Piece:
        """Return the closing block: written when all that came before is flushed."""
        assert end_lsn >= self._identity.start.next_lsn - 1
        values = {
            "sequence": self._identity.sequence,
            "kind": self._identity.kind,
            "chunks": self._chunks,
            "end_lsn": end_lsn,
            "used_stamp_max": used_stamp_max,
            "generation_max": generation_max,
            "content_crc": self._content_crc,
            "header_crc": int.from_bytes(self._header[12:16], "little"),
        }
        values |= {f"rows_{ident}": self._rows.get(ident, 0) for ident in range(TABLES_MAX)}
        return Piece(self._region_bytes - BLOCK_BYTES, memoryview(CLOSING.pack(self._identity.stamp, values)))


def add_chunk(content_crc: int, header: Bytes, body_crc: int) -> int:
    """Return the content checksum with one more chunk, in the order of their indexes."""
    return int(crc32c(bytes(header[12:16]) + body_crc.to_bytes(4, "little"), content_crc))


def _encode_header(identity: FileIdentity, chunk_bytes: int) -> bytes:
    start = identity.start
    return FILE_HEADER.pack(
        identity.stamp,
        {
            "sequence": identity.sequence,
            "kind": identity.kind,
            "chunk_bytes": chunk_bytes,
            "start_position": start.position,
            "start_number": start.number,
            "start_lsn": start.next_lsn,
            "start_chain": start.chain,
            "start_epoch": start.epoch,
            "start_run_id": start.run_id,
        },
    )
