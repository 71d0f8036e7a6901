"""The card format without a device: how fast ten million objects go into a checkpoint and come back with a full journal.

What a recovery costs beyond reading the card: checksums, decoding, replay, and the tables of the engine. All in memory, in
one process; the checkpoint and the ring are made before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bench.harness import at_most
from xkv_gateway.card import layout
from xkv_gateway.card.format_errors import NoRoom
from xkv_gateway.card.journal_format import Placed, Ring, beginning, encode_batch, encode_run_start
from xkv_gateway.card.journal_scan import End, Need, ScannedBatch, Scanner
from xkv_gateway.card.record_codec import decode_records, encode_batches
from xkv_gateway.card.structure import Stamp
from xkv_gateway.card.table_file import FileIdentity, FileKind, TableWriter
from xkv_gateway.card.table_read import TableReader, decode_ends
from xkv_gateway.card.tables import OBJECTS
from xkv_gateway.core.engine import Engine
from xkv_gateway.core.records import NamespaceNamed, PutBatch, Record, ScopeNamed
from xkv_gateway.core.restore import Restored
from xkv_gateway.core.types import EngineLimits, Lsn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from xkv_gateway.card.layout import Layout
    from xkv_gateway.card.tables import Columns

OBJECTS_DEFAULT: Final = 10_000_000
AU_BYTES: Final = 64 << 10
SLICE: Final = 1 << 20
"""Rows that are made at a time."""
PUTS_PER_BATCH: Final = 60
"""Puts of one group commit: a batch of one block, the worst there is for a reader."""
CARD: Final = b"c" * 16
FORMATTED: Final = Stamp(CARD, 1, b"f" * 16)
RUN: Final = Stamp(CARD, 2, b"r" * 16)
SECONDS_MAX: Final = 20.0


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run it and return the results."""
    parser = argparse.ArgumentParser(prog="bench.card_format", description=__doc__)
    parser.add_argument("--objects", type=int, default=OBJECTS_DEFAULT)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(list(argv))
    count = arguments.objects
    card = layout.plan(2 * count * AU_BYTES + (1 << 33), 4096, AU_BYTES, count)
    begin = time.perf_counter()
    pieces, made_s, slowest_s = _checkpoint(card, count)
    ring, batches = _journal(card, count)
    results: dict[str, Any] = {
        "objects": count,
        "checkpoint_bytes": sum(map(len, pieces)),
        "checkpoint_encode_s": round(made_s, 3),
        "slowest_chunk_ms": round(slowest_s * 1e3, 2),
        "journal_bytes": len(ring),
        "journal_batches": batches,
        "preparation_s": round(time.perf_counter() - begin - made_s, 1),
    }
    results |= _recover(card, count, pieces, ring)
    results["peak_memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    results["bars"] = [at_most("recovery without the device, s", results["recovery_s"], SECONDS_MAX)]
    if arguments.json:
        sys.stdout.write(json.dumps(results, indent=2) + "\n")
    return results


def _rows(count: int) -> Iterator[Columns]:
    """Rows of `objects`, in slices."""
    rng = np.random.default_rng(1)
    for first in range(0, count, SLICE):
        slots = np.arange(first, min(count, first + SLICE), dtype=np.uint32)
        ones, zeroes = np.ones(len(slots), np.uint32), np.zeros(len(slots), np.uint32)
        yield {
            "digest_low": rng.integers(0, 2**64, len(slots), np.uint64),
            "digest_high": rng.integers(0, 2**64, len(slots), np.uint64),
            "checksum": rng.integers(0, 2**64, len(slots), np.uint64),
            "used_stamp": slots.astype(np.uint64) + 1,
            "size_bytes": np.full(len(slots), AU_BYTES, np.uint32),
            "namespace_id": zeroes,
            "scope_id": zeroes,
            "generation": zeroes,
            "slot": slots,
            "first_au": slots,
            "first_count_au": ones,
            "hold_s": zeroes.astype(np.uint16),
            "state": ones.astype(np.uint8),
            "extents": ones.astype(np.uint8),
        }


def _checkpoint(card: Layout, count: int) -> tuple[list[memoryview], float, float]:
    """Pieces of a checkpoint, the time to encode it, and the longest that one piece took."""
    identity = FileIdentity(RUN, FileKind.CHECKPOINT, 1, beginning(FORMATTED))
    writer = TableWriter(card.checkpoint_a.length_bytes, identity)
    pieces = [writer.open_pieces()[0].data]
    total = slowest = 0.0
    for columns in _rows(count):
        begin = last = time.perf_counter()
        for piece in writer.chunks(OBJECTS, columns):
            pieces.append(piece.data)
            now = time.perf_counter()
            slowest, last = max(slowest, now - last), now
        total += time.perf_counter() - begin
    pieces.append(writer.close(end_lsn=0, used_stamp_max=count, generation_max=0).data)
    return pieces, total, slowest


def _journal(card: Layout, count: int) -> tuple[bytes, int]:
    """A ring that is full of puts over the slots of the checkpoint, with new generations."""
    ring = Ring(card.journal.length_bytes)
    data = bytearray(ring.ring_bytes)
    batches = 0

    def put(placed: Placed) -> Placed:
        nonlocal batches
        data[placed.offset_bytes : placed.offset_bytes + placed.total_bytes] = b"".join(placed.buffers)
        batches += 1
        return placed

    point = put(encode_run_start(ring, beginning(FORMATTED), RUN, 0)).after
    slot = 0
    while True:
        lsn = point.next_lsn
        records: list[Record] = [_puts(lsn, slot, count)]
        if slot == 0:
            records = [NamespaceNamed(Lsn(1), 0, "bench"), ScopeNamed(Lsn(2), 0, b""), _puts(3, slot, count)]
        (body,) = encode_batches(records, ring.body_bytes_max)
        try:
            point = put(encode_batch(ring, point, RUN, 0, body)).after
        except NoRoom:
            return bytes(data), batches
        slot = slot + PUTS_PER_BATCH


def _puts(lsn: int, first: int, count: int) -> PutBatch:
    slots = (np.arange(first, first + PUTS_PER_BATCH, dtype=np.uint32) % np.uint32(count)).astype(np.uint32)
    wide = slots.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    zeroes, ones = np.zeros(len(slots), np.uint32), np.ones(len(slots), np.uint32)
    sizes = np.full(len(slots), AU_BYTES, np.uint32)
    return PutBatch(
        Lsn(lsn), slots, ones, wide, ~wide, zeroes, zeroes, sizes, wide, ones.astype(np.uint8), slots, ones
    )


def _recover(card: Layout, count: int, pieces: list[memoryview], ring: bytes) -> dict[str, Any]:
    limits = EngineLimits(
        capacity_au=card.capacity_au,
        au_bytes=AU_BYTES,
        max_objects=count,
        object_bytes_max=64 << 20,
        lease_ttl_max_ns=60_000_000_000,
        leases_per_scope_max=1024,
        leased_bytes_per_scope_max=1 << 40,
    )
    begin = time.perf_counter()
    restored = Restored(limits, 0)
    facts = decode_ends(
        pieces[0],
        pieces[-1],
        region_bytes=card.checkpoint_a.length_bytes,
        card_uuid=CARD,
        kind=FileKind.CHECKPOINT,
    )
    assert facts is not None
    restored.begin(facts.identity.start.next_lsn, facts.totals.used_stamp_max, facts.totals.generation_max)
    reader = TableReader(card.checkpoint_a.length_bytes, facts)
    for piece in pieces[1:-1]:
        chunk = reader.decode(piece)
        assert chunk is not None
        restored.add_objects(chunk.columns)
    reader.finish()
    read = time.perf_counter()
    records = _replay(ring, restored)
    replayed = time.perf_counter()
    engine = Engine(limits, digest_secret=bytes(32), entropy=bytes, restored=restored)
    end = time.perf_counter()
    assert engine.usage().live_objects == count
    return {
        "checkpoint_decode_s": round(read - begin, 3),
        "journal_replay_s": round(replayed - read, 3),
        "journal_records": records,
        "engine_tables_s": round(end - replayed, 3),
        "recovery_s": round(end - begin, 3),
    }


def _replay(ring: bytes, restored: Restored) -> int:
    scanner = Scanner(len(ring), CARD, beginning(FORMATTED))
    view, records = memoryview(ring), 0
    while not isinstance(event := scanner.next_event(), End):
        if isinstance(event, Need):
            scanner.feed(view[event.offset_bytes : event.offset_bytes + event.length_bytes])
            continue
        assert isinstance(event, ScannedBatch)
        for record in decode_records(event.body, event.header.first_lsn, event.header.record_count):
            restored.apply(record)
            records += 1
    return records


if __name__ == "__main__":
    main([*sys.argv[1:], "--json"])
