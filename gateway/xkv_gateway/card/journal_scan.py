"""Reads the journal back: batches in order, and at the end the verdict: nothing more, a torn tail, or damage.

The scanner does no I/O. Its caller asks for the next event, and answers `Need` with the bytes:

    while not isinstance(event := scanner.next_event(), End):
        match event:
            case Need(offset, length): scanner.feed(read(offset, length))
            case ScannedBatch(): replay(event)
            case Gap(): distrust(event)

A batch that does not continue the chain ends the journal, unless a later whole batch of this card is found behind it:
then what lies between is damage (`Gap`) and reading goes on behind it. Stale batches never mislead: their position is
of an earlier lap, or their epoch is below that of the last good batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

import numpy as np

from xkv_gateway.card.format_errors import BadChecksum, ChainBroken, FormatError, StaleWrite
from xkv_gateway.card.journal_format import (
    BATCH,
    BatchHeader,
    BatchKind,
    ChainPoint,
    Ring,
    check_body,
    decode_header,
)
from xkv_gateway.card.structure import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from xkv_gateway.card.structure import Bytes

READ_BYTES: Final = 1 << 20
"""How much is asked for at once where a batch does not need more."""
_MAGIC: Final = int.from_bytes(BATCH.magic, "little")
_WORDS: Final = BLOCK_BYTES // 8


@dataclass(frozen=True, slots=True)
class Need:
    """Read these bytes of the ring, and `feed` them. Multiples of 4 KiB, never across the end of the ring."""

    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class ScannedBatch:
    """A batch that continues the journal."""

    header: BatchHeader
    body: memoryview
    """A view of what was fed."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Damage: batches were here that cannot be read any more, and later ones can.

    The last batch before the gap may itself be in doubt: whole, and not the one that the later one was chained to. Then
    its records are within the range, though they have been handed out.
    """

    first_lsn: int
    last_lsn: int
    """The records that are lost or in doubt; below `first_lsn` when only a run start was lost."""
    from_position: int
    to_position: int
    reason: FormatError
    """Why the first of the lost batches cannot be read."""


class Tail(Enum):
    """What is at the end of the journal."""

    EMPTY = "empty"
    """Nothing of this lap."""
    TORN = "torn"
    """The next batch was begun, and never completed: never acknowledged."""


@dataclass(frozen=True, slots=True)
class End:
    """The end of the journal: the next run start goes to `point`."""

    point: ChainPoint
    tail: Tail
    reason: FormatError


Event = Need | ScannedBatch | Gap | End


class Scanner:
    """Reads a journal from a point on.

    Args:
        ring_bytes: length of the journal region.
        card_uuid: of the card.
        start: from a checkpoint, or `journal_format.beginning` where there is none.
        search: whether to look through the rest of the ring for later batches where nothing continues. Without, damage is
            taken for the end: for a reader who knows that nothing is behind it (a clean card), or who looks again at
            a tail that was searched before.
    """

    def __init__(self, ring_bytes: int, card_uuid: bytes, start: ChainPoint, *, search: bool = True) -> None:
        self._ring = Ring(ring_bytes)
        self._card_uuid = card_uuid
        self._searches = search
        self._point = start
        self._last: BatchHeader | None = None
        self._limit = start.position + ring_bytes
        """No batch that recovery needs begins here or behind: it would have overwritten the first."""
        self._window = memoryview(b"")
        self._window_offset = 0
        self._asked: Need | None = None
        self._steps: Generator[Event, None, None] = self._run()

    def next_event(self) -> Event:
        """Return what comes next. After `End`, always the same `End`; after `Need`, the same until it is fed."""
        return self._asked if self._asked is not None else next(self._steps)

    def feed(self, data: Bytes) -> None:
        """Give the bytes that the last `Need` asked for. They are kept and viewed, never changed."""
        assert self._asked is not None, "nothing was asked for"
        assert len(data) == self._asked.length_bytes
        self._window = memoryview(data).toreadonly()
        self._window_offset = self._asked.offset_bytes
        self._asked = None

    # --- the steps, as generators: each `yield` is an event -----------------------------------------------------

    def _run(self) -> Generator[Event, None, None]:
        while True:
            found, faults = yield from self._next()
            if found is None and self._searches:
                found = yield from self._search(faults[0])
            if found is None:
                break
            self._last = found.header
            self._point = found.header.after
            yield found
        torn = [fault for fault in faults if isinstance(fault, BadChecksum)]
        end = End(self._point, Tail.TORN if torn else Tail.EMPTY, (torn or faults)[0])
        while True:
            yield end

    def _next(self) -> Generator[Event, None, tuple[ScannedBatch | None, list[FormatError]]]:
        """Read the batch that continues the chain, at one of the two places where it can be."""
        position = self._point.position
        places = [position]
        if self._ring.offset_of(position):
            places.append(self._ring.lap_start(position))
        faults: list[FormatError] = []
        for place in places:
            try:
                return (yield from self._read(place, self._check_continues)), []
            except FormatError as error:
                faults.append(error)
        return None, faults

    def _search(self, reason: FormatError) -> Generator[Event, None, ScannedBatch | None]:
        """Look for a later batch behind what cannot be read, over the rest of the ring."""
        position = self._point.position
        while position < self._limit:
            length = min(READ_BYTES, self._ring.lap_start(position) - position, self._limit - position)
            blocks = (yield from self._bytes(position, length))[:length]
            words = np.frombuffer(blocks, "<u8").reshape(-1, _WORDS)
            for index in np.flatnonzero(words[:, 0] == _MAGIC).tolist():
                try:
                    found = yield from self._read(position + index * BLOCK_BYTES, self._check_later)
                except FormatError:
                    continue
                header = found.header
                yield self._gap(header, reason)
                return found
            position += length
        return None

    def _read(
        self, position: int, check: Callable[[BatchHeader, int], None]
    ) -> Generator[Event, None, ScannedBatch]:
        header = decode_header((yield from self._bytes(position, BLOCK_BYTES)), self._card_uuid, self._ring)
        if header.position != position:
            raise StaleWrite(BATCH.name, "position", f"of position {header.position}")
        check(header, position)
        return ScannedBatch(
            header, check_body(header, (yield from self._bytes(position, header.total_bytes)))
        )

    def _bytes(self, position: int, length_bytes: int) -> Generator[Event, None, memoryview]:
        offset = self._ring.offset_of(position)
        start = offset - self._window_offset
        if start < 0 or start + length_bytes > len(self._window):
            rest = self._ring.ring_bytes - offset
            self._asked = Need(offset, min(rest, max(length_bytes, READ_BYTES)))
            yield self._asked
            start = 0
        return self._window[start:]

    # --- what may follow ----------------------------------------------------------------------------------------

    def _check_continues(self, header: BatchHeader, position: int) -> None:
        point = self._point
        if header.kind is BatchKind.RUN_START:
            if header.stamp.epoch <= point.epoch:
                raise StaleWrite(BATCH.name, "epoch", f"{header.stamp.epoch} does not follow {point.epoch}")
        elif (header.stamp.epoch, header.stamp.run_id) != (point.epoch, point.run_id):
            raise StaleWrite(BATCH.name, "run_id", "a batch of another run")
        if header.number != point.number:
            raise ChainBroken(BATCH.name, "number", f"{header.number} instead of {point.number}")
        if header.previous_chain != point.chain:
            raise ChainBroken(BATCH.name, "previous_chain", "does not continue the batch before")
        if header.first_lsn != point.next_lsn:
            raise ChainBroken(BATCH.name, "first_lsn", f"{header.first_lsn} instead of {point.next_lsn}")
        if position != self._ring.place(point.position, header.total_bytes):
            raise ChainBroken(BATCH.name, "position", "wrapped although it fitted")

    def _check_later(self, header: BatchHeader, position: int) -> None:  # noqa: ARG002 - as `_check_continues`
        """A whole batch of this lap, of the last run or a later one: neither is ever written over an unread one."""
        stamp, point = header.stamp, self._point
        if (stamp.epoch, stamp.run_id) != (point.epoch, point.run_id) and stamp.epoch <= point.epoch:
            raise StaleWrite(BATCH.name, "epoch", "a batch of an earlier run")

    def _gap(self, header: BatchHeader, reason: FormatError) -> Gap:
        point, last = self._point, self._last
        first_lsn, position = min(point.next_lsn, header.first_lsn), point.position
        if header.number <= point.number and last is not None:
            # No batch is missing between the two, and they do not belong together: the one before is not the one
            # that was written there.
            first_lsn, position = min(first_lsn, last.first_lsn), last.position
        return Gap(first_lsn, max(point.next_lsn, header.first_lsn) - 1, position, header.position, reason)
