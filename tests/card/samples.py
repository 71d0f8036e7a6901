"""One value of each structure of the card format, the same in every test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from xkv_gateway.card import journal_format, layout
from xkv_gateway.card.heartbeat import Heartbeat
from xkv_gateway.card.journal_format import ChainPoint, Placed, Ring
from xkv_gateway.card.record_codec import BatchBody, encode_batches
from xkv_gateway.card.structure import Stamp
from xkv_gateway.card.superblock import NamespaceFacts, Superblock
from xkv_gateway.card.table_file import FileIdentity, FileKind
from xkv_gateway.card.tables import TABLES, pack_names
from xkv_gateway.core.records import (
    ClockRecord,
    DeleteBatch,
    DeleteCause,
    FreedBatch,
    NamespaceNamed,
    PutBatch,
    Record,
    ScopeNamed,
    TenantRecord,
    TenantsKnownRecord,
    TtlRecord,
    WipeRecord,
)
from xkv_gateway.core.types import Lsn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xkv_gateway.card.tables import Columns, Table

CARD: Final = bytes(range(16))
OTHER_CARD: Final = bytes(range(16, 32))
FORMATTED: Final = Stamp(CARD, 1, b"format-run-id-00")
RUN: Final = Stamp(CARD, 2, b"first-run-id-000")
SIZE_BYTES: Final = 64 << 20
LAYOUT: Final = layout.plan(SIZE_BYTES, 512, 64 << 10)
REGION_BYTES: Final = LAYOUT.checkpoint_a.length_bytes
FACTS: Final = NamespaceFacts(b"N" * 16, b"U" * 16, SIZE_BYTES, 512)

SUPERBLOCK: Final = Superblock(
    stamp=RUN,
    sequence=5,
    layout=LAYOUT,
    digest_secret=b"secret-secret-secret-secret-secr",
    nguid=b"N" * 16,
    namespace_uuid=b"U" * 16,
    format_time_ns=1_700_000_000_000_000_000,
    open_time_ns=1_700_000_001_000_000_000,
    clean=True,
    extents_handed_out=True,
    label="käse",
    owner="host-a",
    owner_host_nqn="nqn.2014-08.org.nvmexpress:uuid:0",
    owner_host_id=b"H" * 16,
    owner_boot_id=b"B" * 16,
    owner_pid=4242,
    reservation_key=0x1122334455667788,
    lease_max_ns=60_000_000_000,
    keep_alive_ms=15_000,
    controller_id=7,
)
HEARTBEAT: Final = Heartbeat(RUN, 9, 5, 1_700_000_002_000_000_000, 1000, "host-a")


def records(first_lsn: int = 1) -> list[Record]:
    """Records of each kind; a put of three objects with one, none and two extents."""
    lsns = iter(range(first_lsn, first_lsn + 13))
    u32, u64 = np.uint32, np.uint64
    return [
        NamespaceNamed(Lsn(next(lsns)), 0, "llama-70b/ä"),
        ScopeNamed(Lsn(next(lsns)), 3, b"\x00tenant\xff"),
        PutBatch(
            lsn=Lsn(next(lsns)),
            slots=np.array([1, 2, 3], u32),
            generations=np.array([0, 5, 2**32 - 1], u32),
            digests_low=np.array([1, 2, 2**64 - 1], u64),
            digests_high=np.array([4, 5, 6], u64),
            namespace_ids=np.array([0, 0, 0], u32),
            scope_ids=np.array([3, 3, 3], u32),
            sizes_bytes=np.array([4097, 0, 130000], u32),
            checksums=np.array([7, 8, 9], u64),
            extent_counts=np.array([1, 0, 2], np.uint8),
            extent_starts_au=np.array([10, 20, 30], u32),
            extent_counts_au=np.array([1, 1, 1], u32),
        ),
        DeleteBatch(Lsn(next(lsns)), DeleteCause.WIPED, np.array([1, 2], u32), np.array([0, 5], u32)),
        FreedBatch(Lsn(next(lsns)), np.array([1], u32), np.array([0], u32)),
        WipeRecord(Lsn(next(lsns)), "llama-70b/ä", b"\x00tenant\xff"),
        WipeRecord(Lsn(next(lsns)), "", None),
        TenantRecord(Lsn(next(lsns)), b"\x00tenant\xff", 5 << 30, "käse"),
        TenantRecord(Lsn(next(lsns)), b"", 0, None),
        TenantRecord(Lsn(next(lsns)), b"named", None, "n"),
        TenantRecord(Lsn(next(lsns)), b"gone", None, None),
        TenantsKnownRecord(Lsn(next(lsns)), known=False),
        TenantsKnownRecord(Lsn(next(lsns)), known=True),
    ]


def time_records(first_lsn: int = 1) -> list[Record]:
    """Records of FEATURE_TIMES."""
    lsns = iter(range(first_lsn, first_lsn + 5))
    slots = np.array([4], np.uint32)
    return [
        ClockRecord(Lsn(next(lsns)), 1_700_000_000),
        TtlRecord(Lsn(next(lsns)), "llama-70b/ä", 3600, 7 * 86_400),
        TtlRecord(Lsn(next(lsns)), "", 0, 60),
        TtlRecord(Lsn(next(lsns)), "gone", 0, 0),
        DeleteBatch(Lsn(next(lsns)), DeleteCause.EVICTED_TTL, slots, slots),
    ]


def plain(record: Record) -> tuple[Any, ...]:
    """Make records comparable: arrays become lists."""
    values = (getattr(record, name) for name in type(record).__slots__)
    return (type(record), *(v.tolist() if isinstance(v, np.ndarray) else v for v in values))


def deletes(first_lsn: int, count: int, objects: int = 1) -> BatchBody:
    """A batch of `count` small records."""
    slots = np.arange(objects, dtype=np.uint32)
    made: list[Record] = [
        DeleteBatch(Lsn(first_lsn + i), DeleteCause.DELETED, slots, slots) for i in range(count)
    ]
    (batch,) = encode_batches(made, 1 << 20)
    return batch


class JournalImage:
    """A ring in memory, written as a gateway writes it."""

    def __init__(self, ring_bytes: int = 256 << 10, run: Stamp = RUN) -> None:
        self.ring = Ring(ring_bytes)
        self.data = bytearray(ring_bytes)
        self.point: ChainPoint = journal_format.beginning(FORMATTED)
        self.needed_from = 0
        self.run = run
        self.placed: list[Placed] = []
        self.start_run(run)

    def put(self, placed: Placed) -> Placed:
        blob = b"".join(placed.buffers)
        self.data[placed.offset_bytes : placed.offset_bytes + len(blob)] = blob
        self.point = placed.after
        self.placed.append(placed)
        return placed

    def start_run(self, run: Stamp) -> Placed:
        self.run = run
        return self.put(journal_format.encode_run_start(self.ring, self.point, run, self.needed_from))

    def append(self, count: int = 1, objects: int = 1) -> Placed:
        body = deletes(self.point.next_lsn, count, objects)
        return self.put(journal_format.encode_batch(self.ring, self.point, self.run, self.needed_from, body))


def identity(sequence: int = 4, kind: FileKind = FileKind.CHECKPOINT) -> FileIdentity:
    start = ChainPoint(8192, 2, 11, 0x1234567800000001, RUN.epoch, RUN.run_id)
    return FileIdentity(RUN, kind, sequence, start)


def columns(table: Table, rows: int, seed: int = 1) -> Columns:
    """Random rows of a table."""
    rng = np.random.default_rng(seed)
    return {
        column.name: rng.integers(0, 256, rows * column.width_bytes, dtype=np.uint8).view(column.dtype)
        for column in table.columns
    }


def named(names: Sequence[bytes], table: Table) -> Columns:
    """Rows of a table of names."""
    packed, lengths = pack_names(list(names), table.columns[1].width_bytes)
    return {"ident": np.arange(len(names), dtype=np.uint32), "name": packed, "name_bytes": lengths}


ALL_TABLES: Final = tuple(TABLES.values())
FIRST_TABLES: Final = ALL_TABLES[:6]
TIME_TABLES: Final = ALL_TABLES[6:]
