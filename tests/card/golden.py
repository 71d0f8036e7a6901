"""The golden bytes of the card format: what each structure of `samples` looks like on a card.

    python -m tests.card.golden     writes the files of the current FORMAT_VERSION anew

Only for a new version: the files of a version that was released never change.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from tests.card import samples
from xkv_gateway.card import heartbeat, superblock
from xkv_gateway.card.journal_format import encode_batch
from xkv_gateway.card.record_codec import encode_batches
from xkv_gateway.card.structure import FORMAT_VERSION
from xkv_gateway.card.table_file import TableWriter

if TYPE_CHECKING:
    from xkv_gateway.card.tables import Columns, Table

FOLDER: Final = Path(__file__).parents[1] / "golden"
ROW_BYTES: Final = 32


def pattern(table: Table, rows: int) -> Columns:
    """Rows whose bytes count up, so that a moved column shows."""
    return {
        column.name: (np.arange(rows * column.width_bytes) * 7 + 16 * index + 1)
        .astype(np.uint8)
        .view(column.dtype)
        for index, column in enumerate(table.columns)
    }


def structures() -> dict[str, bytes]:
    """Every structure, by the name of its file."""
    image = samples.JournalImage()
    run_start = image.placed[0]
    (body,) = encode_batches(samples.records(1), 1 << 16)
    batch = encode_batch(image.ring, image.point, samples.RUN, 0, body)
    writer = TableWriter(samples.REGION_BYTES, samples.identity())
    times = TableWriter(samples.REGION_BYTES, samples.identity())
    (times_body,) = encode_batches(samples.time_records(1), 1 << 16)
    header = writer.open_pieces()[0]
    # The tables of a feature that came later follow in a file of their own, so that those of before stay as they are.
    chunks = [
        (table.name, next(iter(each.chunks(table, samples.columns(table, 3)))))
        for each, tables in ((writer, samples.FIRST_TABLES), (times, samples.TIME_TABLES))
        for table in tables
    ]
    return {
        "superblock-0": superblock.encode(samples.SUPERBLOCK, 0),
        "superblock-1": superblock.encode(samples.SUPERBLOCK, 1),
        "heartbeat": heartbeat.encode(samples.HEARTBEAT),
        "batch-run-start": b"".join(run_start.buffers),
        "batch-records": b"".join(batch.buffers),
        "batch-time-records": times_body.body,
        "table-header": bytes(header.data),
        **{f"table-chunk-{name}": bytes(piece.data) for name, piece in chunks},
        "table-closing": bytes(writer.close(20, 77, 9).data),
    }


def dump(data: bytes) -> str:
    """Offset and bytes of every row that is not all zero, then the size."""
    rows = [
        f"{at:04x}: {data[at : at + ROW_BYTES].hex()}"
        for at in range(0, len(data), ROW_BYTES)
        if any(data[at : at + ROW_BYTES])
    ]
    return "\n".join([*rows, f"{len(data):04x}"]) + "\n"


def path_of(name: str) -> Path:
    """The file of a structure in this version of the format."""
    return FOLDER / f"card-v{FORMAT_VERSION}-{name}.hex"


def main() -> None:
    """Write all files."""
    FOLDER.mkdir(exist_ok=True)
    for name, data in structures().items():
        path_of(name).write_text(dump(data))


if __name__ == "__main__":
    main()
