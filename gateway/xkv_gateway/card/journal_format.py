"""The journal: a ring of batches, each chained to the one before it.

Vocabulary
    ring        the journal region; `ring_bytes` long
    position    where a batch begins, counted in bytes since the card was formatted; never wraps. Its offset in the ring
                is position modulo ring_bytes, so a batch of an earlier lap is told from one of this lap by one number.
    batch       header (128 bytes), body, zeroes to 4 KiB. One is written at a time, and is durable before the next is
                written: so a whole batch behind a broken one proves that the broken one was once whole.
    chain       header CRC and body CRC of a batch as one number; the next one carries it
    run start   a batch without records, the first of each run: it links the run to the last good batch of the run before.
                Nothing else of a run is written before its run start is durable, so whatever a dead run left behind it, or
                still had on its way, is superseded at that position.
    wrap rule   a batch never crosses the end of the ring: one that does not fit in what is left of a lap begins at the start
                of the next. No marker says so; a reader that finds no continuation looks there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from crc32c import crc32c

from xkv_gateway.card.format_errors import BadChecksum, ForeignCard, NoRoom, Truncated
from xkv_gateway.card.structure import BLOCK_BYTES, Stamp, Structure, align_up

if TYPE_CHECKING:
    from xkv_gateway.card.record_codec import BatchBody
    from xkv_gateway.card.structure import Bytes

BATCH: Final = Structure(
    "batch",
    b"XKVBATCH",
    128,
    (
        ("u64", "number"),
        ("u64", "position"),
        ("u64", "first_lsn"),
        ("u64", "last_lsn"),
        ("u64", "previous_chain"),
        ("u32", "body_bytes"),
        ("u32", "body_crc"),
        ("u32", "record_count"),
        ("u16", "kind"),
        ("zero[2]", ""),
    ),
)
HEADER_BYTES: Final = BATCH.size_bytes
BATCH_BYTES_MAX: Final = 8 << 20
"""Bounds what a reader must hold, and how long one batch keeps the next waiting."""
RING_SHARE: Final = 4
"""A batch takes at most this share of the ring (1/4), so that wrapping never wastes much of it."""
RUN_STARTS_RESERVED: Final = 4
"""Blocks that records never take: however full the ring, so many runs can begin before one completes a checkpoint."""
FIRST_LSN: Final = 1


class BatchKind(IntEnum):
    """What a batch is."""

    RUN_START = 1
    RECORDS = 2


_KINDS: Final = frozenset(kind.value for kind in BatchKind)


@dataclass(frozen=True, slots=True)
class ChainPoint:
    """Where the journal goes on: what the next batch must say of itself."""

    position: int
    number: int
    """Of the next batch, counted since the card was formatted."""
    next_lsn: int
    chain: int
    """Of the batch before; 0 at the very beginning."""
    epoch: int
    """Of the run that wrote the batch before."""
    run_id: bytes


def beginning(formatted_by: Stamp) -> ChainPoint:
    """Return the point at which the journal of a card begins that was just formatted."""
    return ChainPoint(0, 0, FIRST_LSN, 0, formatted_by.epoch, formatted_by.run_id)


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """The header of a batch. Fields as in FORMAT.md."""

    stamp: Stamp
    kind: BatchKind
    number: int
    position: int
    first_lsn: int
    last_lsn: int
    """One below `first_lsn` where there are no records."""
    previous_chain: int
    body_bytes: int
    body_crc: int
    record_count: int
    chain: int
    """Computed: what the next batch carries as `previous_chain`."""

    @property
    def total_bytes(self) -> int:
        """What the batch takes in the ring."""
        return align_up(HEADER_BYTES + self.body_bytes)

    @property
    def after(self) -> ChainPoint:
        """The point behind this batch."""
        return ChainPoint(
            self.position + self.total_bytes,
            self.number + 1,
            self.last_lsn + 1,
            self.chain,
            self.stamp.epoch,
            self.stamp.run_id,
        )


@dataclass(frozen=True, slots=True)
class Placed:
    """A batch that is ready to be written: one transfer of `buffers`, in order, at `offset_bytes` of the ring."""

    offset_bytes: int
    buffers: tuple[bytes, ...]
    position: int
    after: ChainPoint

    @property
    def total_bytes(self) -> int:
        """Length of the transfer: a multiple of 4 KiB."""
        return sum(map(len, self.buffers))


class Ring:
    """The arithmetic of a ring of `ring_bytes`, a multiple of 4 KiB."""

    def __init__(self, ring_bytes: int) -> None:
        assert ring_bytes > 0
        assert ring_bytes % BLOCK_BYTES == 0
        self.ring_bytes = ring_bytes
        self.batch_bytes_max = min(BATCH_BYTES_MAX, ring_bytes // RING_SHARE // BLOCK_BYTES * BLOCK_BYTES)

    @property
    def body_bytes_max(self) -> int:
        """The longest body of a batch."""
        return self.batch_bytes_max - HEADER_BYTES

    def offset_of(self, position: int) -> int:
        """Return where in the ring a position lies."""
        return position % self.ring_bytes

    def lap_start(self, position: int) -> int:
        """Return the first position of the next lap."""
        return position - position % self.ring_bytes + self.ring_bytes

    def place(self, position: int, total_bytes: int) -> int:
        """Return where a batch begins that follows one that ends at `position` (the wrap rule)."""
        assert 0 < total_bytes <= self.batch_bytes_max
        lap_start = self.lap_start(position)
        return lap_start if position + total_bytes > lap_start else position

    def free_bytes(self, position: int, needed_from: int) -> int:
        """Return how much records can take at `position` while recovery needs all from `needed_from` on."""
        assert needed_from <= position
        return max(0, needed_from + self.ring_bytes - RUN_STARTS_RESERVED * BLOCK_BYTES - position)


def encode_run_start(ring: Ring, point: ChainPoint, stamp: Stamp, needed_from: int) -> Placed:
    """Return the first batch of a run: of a greater epoch than all before.

    Raises:
        NoRoom: so many runs began without completing a checkpoint that nothing is left; complete one first, then begin.
    """
    assert stamp.epoch > point.epoch, "a run has a greater epoch than the one before"
    fields = {"kind": BatchKind.RUN_START, "first_lsn": point.next_lsn, "last_lsn": point.next_lsn - 1}
    return _encode(ring, point, stamp, needed_from, fields | {"record_count": 0}, b"")


def encode_batch(ring: Ring, point: ChainPoint, stamp: Stamp, needed_from: int, batch: BatchBody) -> Placed:
    """Return a batch of records.

    Args:
        ring: the ring.
        point: the end of the journal.
        stamp: the running run, which must have started.
        needed_from: position of the first batch that recovery may need: the start of the older checkpoint.
        batch: records from `point.next_lsn` on; at most `ring.body_bytes_max`.

    Raises:
        NoRoom: it would overwrite what recovery needs; a checkpoint must be completed first.
    """
    assert (stamp.epoch, stamp.run_id) == (point.epoch, point.run_id), "the run has not started"
    assert batch.first_lsn == point.next_lsn, "the journal has no holes"
    fields = {"kind": BatchKind.RECORDS, "first_lsn": batch.first_lsn, "last_lsn": batch.last_lsn}
    return _encode(
        ring,
        point,
        stamp,
        needed_from,
        fields | {"record_count": batch.last_lsn - batch.first_lsn + 1},
        batch.body,
    )


def _encode(
    ring: Ring, point: ChainPoint, stamp: Stamp, needed_from: int, fields: dict[str, int], body: bytes
) -> Placed:
    total_bytes = align_up(HEADER_BYTES + len(body))
    position = ring.place(point.position, total_bytes)
    reserved_bytes = 0 if fields["kind"] == BatchKind.RUN_START else RUN_STARTS_RESERVED * BLOCK_BYTES
    if position + total_bytes + reserved_bytes - needed_from > ring.ring_bytes:
        raise NoRoom(BATCH.name, "position", "the journal is full: a checkpoint must be completed first")
    padding = bytes(total_bytes - HEADER_BYTES - len(body))
    body_crc = crc32c(padding, crc32c(body))
    header = BATCH.pack(
        stamp,
        fields
        | {
            "number": point.number,
            "position": position,
            "previous_chain": point.chain,
            "body_bytes": len(body),
            "body_crc": body_crc,
        },
    )
    after = ChainPoint(
        position + total_bytes,
        point.number + 1,
        fields["last_lsn"] + 1,
        int.from_bytes(header[12:16], "little") << 32 | body_crc,
        stamp.epoch,
        stamp.run_id,
    )
    return Placed(ring.offset_of(position), (header, body, padding), position, after)


def decode_header(block: Bytes, card_uuid: bytes, ring: Ring) -> BatchHeader:
    """Return the header of a batch, checked by itself: the body and the chain are not looked at.

    Raises:
        FormatError: Truncated, BadMagic, BadChecksum, UnknownVersion, BadField; ForeignCard: of another card.
    """
    stamp, values = BATCH.unpack(block)
    if stamp.card_uuid != card_uuid:
        raise ForeignCard(BATCH.name, "card_uuid", "a batch of another card")
    BATCH.require(values["kind"] in _KINDS, "kind", "unknown kind")
    kind = BatchKind(values["kind"])
    BATCH.require(values["position"] % BLOCK_BYTES == 0, "position", "not aligned")
    BATCH.require(HEADER_BYTES + values["body_bytes"] <= ring.batch_bytes_max, "body_bytes", "too long")
    count = values["record_count"]
    BATCH.require(
        values["last_lsn"] - values["first_lsn"] + 1 == count, "record_count", "not what the LSNs say"
    )
    BATCH.require((count == 0) is (kind is BatchKind.RUN_START), "record_count", "not what the kind says")
    header = BatchHeader(
        stamp,
        kind,
        values["number"],
        values["position"],
        values["first_lsn"],
        values["last_lsn"],
        values["previous_chain"],
        values["body_bytes"],
        values["body_crc"],
        count,
        values["crc"] << 32 | values["body_crc"],
    )
    offset = ring.offset_of(header.position)
    BATCH.require(offset + header.total_bytes <= ring.ring_bytes, "position", "crosses the end of the ring")
    return header


def check_body(header: BatchHeader, batch: memoryview) -> memoryview:
    """Return the body of a batch, whose whole bytes (or more) are `batch`.

    Raises:
        Truncated, BadChecksum.
    """
    if len(batch) < header.total_bytes:
        raise Truncated(BATCH.name, "", f"{len(batch)} of {header.total_bytes} bytes")
    if crc32c(batch[HEADER_BYTES : header.total_bytes]) != header.body_crc:
        raise BadChecksum(BATCH.name, "body_crc", "the body is damaged")
    return batch[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
