"""Exact least-recently-used order of millions of objects, as lazy logs.

Each scope has an append-only log of (slot, stamp); stamps are unique and rise. An entry counts while the slot's stamp
equals its own, so a touch of a batch is one append, and old entries go stale by themselves. The oldest is read off the
front; stale entries are dropped there or, when they pile up, by a sweep that rewrites a few chunks for each new one, so
the work is spread and there is no pause (stale entries stay below the live ones, and a constant). The order over all
scopes is a heap by their first stamps, as lazy.

An object that cannot be evicted now (leased, pinned, not yet live) and is met at the front is *parked*: it leaves the
log, and returns to the front with its old stamp when its guard ends. So one such object never blocks or slows those behind it.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from .arrays import U64, Slots

CHUNK_MIN: Final = 8
CHUNK_MAX: Final = 4096
SWEEP_SLACK: Final = 64
SWEEP_CHUNKS: Final = 6
"""Old chunks rewritten for each new one."""
HEAP_SLACK: Final = 256
NEVER: Final = 1 << 63
"""Later than every stamp."""


class _Chunk:
    __slots__ = ("begin", "end", "slots", "stamps")

    def __init__(self, slots: Slots, stamps: U64, end: int) -> None:
        self.slots = slots
        self.stamps = stamps
        self.begin = 0
        self.end = end

    def entries(self) -> tuple[Slots, U64]:
        return self.slots[self.begin : self.end], self.stamps[self.begin : self.end]


class UseLog:
    """The order of use within one scope."""

    __slots__ = ("bound", "chunks", "entries", "front", "sweep_at")

    def __init__(self) -> None:
        self.chunks: list[_Chunk] = []
        self.entries = 0
        self.sweep_at = 0
        self.front: list[tuple[int, int]] | None = None
        """Heap of (stamp, slot): objects that were parked and can be evicted again. Older than the log's."""
        self.bound: int | None = None
        """What the heap over all scopes knows: no valid entry is older. None: not in that heap."""

    def append(self, slots: Slots, stamps: U64, members: int, stamp_of: U64) -> None:
        """Add entries; `members` is how many objects the scope has, `stamp_of` the stamps by slot."""
        done = 0
        while done < len(slots):
            last = self.chunks[-1] if self.chunks else None
            if last is None or last.end == len(last.slots):
                if self.entries > members + members // 2 + SWEEP_SLACK:
                    self._sweep(stamp_of)
                size = min(CHUNK_MAX, max(CHUNK_MIN, self.entries))
                last = _Chunk(np.empty(size, np.uint32), np.empty(size, np.uint64), 0)
                self.chunks.append(last)
            count = min(len(slots) - done, len(last.slots) - last.end)
            last.slots[last.end : last.end + count] = slots[done : done + count]
            last.stamps[last.end : last.end + count] = stamps[done : done + count]
            last.end += count
            done += count
            self.entries += count

    def first_stamp(self) -> int | None:
        """A stamp that no entry is older than, or None: no entries."""
        head = self.head_stamp()
        if self.front:
            head = min(head, self.front[0][0])
        return None if head == NEVER else head

    def head_stamp(self) -> int:
        """Stamp of the log's first entry, valid or not; NEVER: none."""
        return int(self.chunks[0].stamps[self.chunks[0].begin]) if self.chunks else NEVER

    def head(self, count: int, limit: int) -> tuple[Slots, U64]:
        """Entries of the first chunk, at most `count`, older than `limit`."""
        slots, stamps = self.chunks[0].entries()
        end = int(np.searchsorted(stamps[:count], np.uint64(limit)))
        return slots[:end], stamps[:end]

    def members(self, stamp_of: U64) -> Iterator[Slots]:
        """Valid entries, in parts; what is parked is not among them."""
        for chunk in self.chunks:
            slots, stamps = chunk.entries()
            yield slots[stamp_of[slots] == stamps]
        if self.front:
            yield np.array(sorted({s for t, s in self.front if int(stamp_of[s]) == t}), np.intp)

    def _sweep(self, stamp_of: U64) -> None:
        """Rewrite some chunks without their stale entries, and join small ones."""
        for _ in range(SWEEP_CHUNKS):
            if self.sweep_at >= len(self.chunks):
                self.sweep_at = 0
                if not self.chunks:
                    return
            chunk = self.chunks[self.sweep_at]
            slots, stamps = chunk.entries()
            valid = stamp_of[slots] == stamps
            kept_slots, kept_stamps = slots[valid], stamps[valid]
            self.entries -= len(slots) - len(kept_slots)
            if self.sweep_at:
                before = self.chunks[self.sweep_at - 1]
                if before.end - before.begin + len(kept_slots) <= CHUNK_MAX:
                    old_slots, old_stamps = before.entries()
                    kept_slots = np.concatenate((old_slots, kept_slots))
                    kept_stamps = np.concatenate((old_stamps, kept_stamps))
                    self.sweep_at -= 1
                    del self.chunks[self.sweep_at]
            if len(kept_slots):
                self.chunks[self.sweep_at] = _Chunk(kept_slots, kept_stamps, len(kept_slots))
                self.sweep_at += 1
            else:
                del self.chunks[self.sweep_at]

    def pop_head(self) -> int:
        """Remove the first entry; returns its slot."""
        slot = int(self.chunks[0].slots[self.chunks[0].begin])
        self.drop_head(1)
        return slot

    def drop_head(self, count: int) -> None:
        """Remove the first `count` entries of the first chunk."""
        head = self.chunks[0]
        head.begin += count
        self.entries -= count
        if head.begin == head.end:
            del self.chunks[0]
            self.sweep_at = max(0, self.sweep_at - 1)


class Recency:
    """Stamps by slot, and the heap over all scopes."""

    def __init__(self, max_objects: int) -> None:
        self.stamp_of: U64 = np.zeros(max_objects, np.uint64)
        """0: in no log."""
        self.parked: dict[int, int] = {}
        """Slot to scope: valid, but in no log until their guard ends. Never more than leased, pinned or reserved ones."""
        self.heap: list[tuple[int, int]] = []
        """(bound, scope): the order over all scopes."""
        self._next_stamp = 1
        self._stale_heap_entries = 0

    @property
    def newest_stamp(self) -> int:
        """The youngest stamp that was given; 0: none."""
        return self._next_stamp - 1

    def restore(self, log: UseLog, scope: int, slots: Slots, stamps: U64) -> None:
        """Begin a scope's order with these, stamps ascending and unique."""
        self.stamp_of[slots] = stamps
        self._next_stamp = max(self._next_stamp, int(stamps[-1]) + 1)
        for begin in range(0, len(slots), CHUNK_MAX):
            log.append(
                slots[begin : begin + CHUNK_MAX], stamps[begin : begin + CHUNK_MAX], len(slots), self.stamp_of
            )
        self.list_log(log, scope)

    def touch(self, log: UseLog, scope: int, slots: Slots, members: int) -> Slots:
        """Make `slots` the youngest, the first of them last of all: the tail of a prompt goes before its head.

        Returns:
            The slots without repetitions.
        """
        count = len(slots)
        if not count:
            return slots
        stamps = np.arange(self._next_stamp, self._next_stamp + count, dtype=np.uint64)
        self._next_stamp += count
        backwards = slots[::-1]
        # Where a slot occurs twice the last assignment stays, so exactly one of its entries is valid.
        self.stamp_of[backwards] = stamps
        valid = self.stamp_of[backwards] == stamps
        if np.count_nonzero(valid) != count:
            backwards, stamps = backwards[valid], stamps[valid]
        if self.parked:
            self._unpark(backwards)
        log.append(backwards, stamps, members, self.stamp_of)
        if log.bound is None:
            self.list_log(log, scope)
        return backwards

    def forget(self, slots: Slots) -> None:
        """Take slots out of the order."""
        self.stamp_of[slots] = 0
        if self.parked:
            self._unpark(slots)

    def park(self, scope: int, slots: Slots) -> None:
        """Keep slots out of the log until `return_parked`."""
        self.parked.update(dict.fromkeys(slots.tolist(), scope))

    def return_parked(self, log: UseLog, scope: int, slot: int) -> None:
        """Put a parked slot back where its stamp says."""
        del self.parked[slot]
        stamp = int(self.stamp_of[slot])
        if log.front is None:
            log.front = []
        heapq.heappush(log.front, (stamp, slot))
        if log.bound is None or stamp < log.bound:
            self.list_log(log, scope)

    def members(self, log: UseLog, scope: int) -> Slots:
        """All slots of a scope that are in the order."""
        parked = [slot for slot, where in self.parked.items() if where == scope]
        parts = [*log.members(self.stamp_of), np.array(parked, np.intp)]
        return np.concatenate(parts)

    def list_log(self, log: UseLog, scope: int) -> None:
        """Enter the scope in the heap by its first stamp, if it has one."""
        log.bound = log.first_stamp()
        if log.bound is not None:
            heapq.heappush(self.heap, (log.bound, scope))

    def drop_log(self, log: UseLog, living: Callable[[], Iterable[tuple[UseLog, int]]]) -> None:
        """A scope went: its entry in the heap is stale, and when most are, the heap is made anew from `living`."""
        if log.bound is None:
            return
        log.bound = None
        self._stale_heap_entries += 1
        if self._stale_heap_entries > HEAP_SLACK + len(self.heap) // 2:
            self.heap = [(log.bound, scope) for log, scope in living() if log.bound is not None]
            heapq.heapify(self.heap)
            self._stale_heap_entries = 0

    def _unpark(self, slots: Slots) -> None:
        for slot in slots.tolist():
            self.parked.pop(slot, None)
