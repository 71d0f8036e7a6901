"""The hash table from identity digests to slots, whole batches at a time.

A table of buckets of eight cells (32-bit tag, 32-bit slot), sized for the object limit so that it is at most half full
and never grows. The bucket comes from the upper half of the digest's low word, the tag from its lower half, and a cell
counts only after all 128 bits were compared with those in the slot arrays. What does not fit its bucket (under 1 % at
the limit) waits in a dict. Invariant: a bucket with overflow is full, so a miss in a bucket with room ends there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from .arrays import U32, U64, Bools, Slots

CELLS: Final = 8
_FILL: Final = 4
"""Objects a bucket at the object limit."""
_HALF: Final = np.uint64(32)
_EMPTY: Final = 0
_TAG_MIN: Final = np.uint32(1)


class Index:
    """Digest to slot. The digests themselves live in the slot arrays given to the constructor."""

    def __init__(self, max_objects: int, digest_low: U64, digest_high: U64) -> None:
        self._low = digest_low
        self._high = digest_high
        self._bucket_count = max(1, -(-max_objects // _FILL))
        self._buckets = np.uint64(self._bucket_count)
        self._tags: U32 = np.zeros((self._bucket_count, CELLS), np.uint32)
        self._cells: U32 = np.zeros((self._bucket_count, CELLS), np.uint32)
        self._flat_tags = self._tags.reshape(-1)
        self._flat_cells = self._cells.reshape(-1)
        self._overflow: dict[int, list[int]] = {}
        self.count = 0

    @property
    def overflow_count(self) -> int:
        """Slots that did not fit their bucket."""
        return sum(map(len, self._overflow.values()))

    def find(self, low: U64, high: U64) -> tuple[Slots, Bools]:
        """Slot of each digest and whether it is held (where it is not, the slot means nothing)."""
        if len(low) == 1:
            bucket, tag = self._place_one(int(low[0]))
            one = self._find_one(bucket, tag, low[0], high[0])
            return np.array((one or 0,), np.intp), np.array((one is not None,))
        buckets, tags = self._place(low)
        rows = self._tags.take(buckets, axis=0)
        match = rows == tags[:, None]
        cell = match.argmax(axis=1)
        cell += buckets * CELLS
        slots = self._flat_cells.take(cell).astype(np.intp)
        held = self._flat_tags.take(cell) == tags
        held &= self._low.take(slots) == low
        held &= self._high.take(slots) == high
        if np.count_nonzero(held) != len(held):
            doubtful = match.any(axis=1)
            if self._overflow:
                doubtful |= rows.all(axis=1)
            doubtful &= ~held
            for i in np.flatnonzero(doubtful).tolist():
                slot = self._find_one(int(buckets[i]), int(tags[i]), low[i], high[i])
                if slot is not None:
                    slots[i] = slot
                    held[i] = True
        return slots, held

    def insert(self, slots: Slots) -> None:
        """Add slots whose digests are in the slot arrays already; none may be held yet."""
        if len(slots) == 1:
            slot = int(slots[0])
            self._insert_one(*self._place_one(int(self._low[slot])), slot)
            self.count += 1
            return
        buckets, tags = self._place(self._low[slots])
        empty = self._tags[buckets] == _EMPTY
        cell = empty.argmax(axis=1) + buckets * CELLS
        room = self._flat_tags[cell] == _EMPTY
        self._flat_cells[cell[room]] = slots[room]
        # Two of the batch may want one cell: the last one written has it, the others are placed one by one.
        won = room & (self._flat_cells[cell] == slots)
        self._flat_tags[cell[won]] = tags[won]
        self.count += len(slots)
        if not won.all():
            for i in np.flatnonzero(~won).tolist():
                self._insert_one(int(buckets[i]), int(tags[i]), int(slots[i]))

    def remove(self, slots: Slots) -> None:
        """Take out slots that are held."""
        buckets, tags = self._place(self._low[slots])
        match = self._cells[buckets] == slots[:, None]
        match &= self._tags[buckets] == tags[:, None]
        inside = match.any(axis=1)
        cell = match.argmax(axis=1) + buckets * CELLS
        self._flat_tags[cell[inside]] = _EMPTY
        self.count -= len(slots)
        if not self._overflow:
            assert inside.all(), "a slot to remove is not in the index"
            return
        for i in np.flatnonzero(~inside).tolist():
            self._remove_overflowed(int(buckets[i]), int(slots[i]))
        for bucket in buckets.tolist():
            if bucket in self._overflow:
                self._refill(bucket)

    def _place(self, low: U64) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], U32]:
        places = low >> _HALF
        places *= self._buckets
        places >>= _HALF
        tags = low.astype(np.uint32)
        np.maximum(tags, _TAG_MIN, out=tags)
        return places.view(np.int64), tags

    def _place_one(self, low: int) -> tuple[int, int]:
        return (low >> 32) * self._bucket_count >> 32, max(1, low & 0xFFFFFFFF)

    def _find_one(self, bucket: int, tag: int, low: np.uint64, high: np.uint64) -> int | None:
        tags = self._tags[bucket].tolist()
        inside = [int(self._cells[bucket, i]) for i, each in enumerate(tags) if each == tag]
        for slot in inside + self._overflow.get(bucket, []):
            if self._low[slot] == low and self._high[slot] == high:
                return int(slot)
        return None

    def _insert_one(self, bucket: int, tag: int, slot: int) -> None:
        tags = self._tags[bucket].tolist()
        if _EMPTY in tags:
            cell = tags.index(_EMPTY)
            self._cells[bucket, cell] = slot
            self._tags[bucket, cell] = tag
        else:
            self._overflow.setdefault(bucket, []).append(slot)

    def _remove_overflowed(self, bucket: int, slot: int) -> None:
        waiting = self._overflow[bucket]
        waiting.remove(slot)
        if not waiting:
            del self._overflow[bucket]

    def _refill(self, bucket: int) -> None:
        waiting = self._overflow.pop(bucket)
        for slot in waiting:
            self._insert_one(bucket, self._place_one(int(self._low[slot]))[1], slot)
