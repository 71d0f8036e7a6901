"""The allocator of the data area: objects are short lists of runs of allocation units.

One byte a unit says whether it is free, and one counter a chunk of 4096 units how many are, so that a search skips
what is full without looking at it (10 million units: 2,442 counters). Batches of equal sizes are placed together: the
free runs of a window are found with a few vector operations and cut into pieces; where there is room enough, one run
for all of the batch is looked for first, because what lies together travels together. A cursor goes round (next fit), so
that what was just freed is not reused at once and a scan does not begin with the same full chunks each time. An object
that no run within the search bound holds is split over fragments, and when that takes more than
`EXTENTS_MAX`, the longest runs of the whole area are tried.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .arrays import I64, U8, Bools

CHUNK_AU: Final = 4096
WINDOW_CHUNKS: Final = 4
"""Chunks looked at together."""
TOGETHER_WINDOWS: Final = 2
"""Windows searched for one run that holds a whole batch."""
SPARE: Final = 16
"""... while so many times as much is free: where room is short there is hardly such a run."""
SEARCH_WINDOWS: Final = 8
"""Windows searched for whole runs before an object is split over fragments."""
EXTENTS_MAX: Final = 64
"""Extents of one object, at most."""


@dataclass(slots=True)
class Allocation:
    """Extents of a batch: the first of each object, and the others of the few that were split.

    An object with `failed` set has none: its units lie in more than EXTENTS_MAX pieces.
    """

    starts: I64
    counts: I64
    others: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)


def runs_of(free: U8) -> tuple[I64, I64]:
    """Starts and lengths of the runs of ones in `free`, in order."""
    edges = np.empty(len(free) + 2, np.int8)
    edges[0] = edges[-1] = 0
    edges[1:-1] = free
    changes = np.flatnonzero(edges[1:] != edges[:-1])
    starts = changes[::2]
    return starts, changes[1::2] - starts


def units_of_runs(starts: I64, counts: I64) -> I64:
    """Every unit of the runs, run after run."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    first = np.repeat(starts - (ends - counts), counts)
    first += np.arange(total)
    return first


class Allocator:
    """Units 0..capacity_au-1, all free at first."""

    def __init__(self, capacity_au: int) -> None:
        self.capacity_au = capacity_au
        self.free_au = capacity_au
        chunks = max(1, -(-capacity_au // CHUNK_AU))
        self._free: U8 = np.ones(capacity_au, np.uint8)
        self._chunk_free: I64 = np.full(chunks, CHUNK_AU, np.int64)
        self._chunk_free[-1] = capacity_au - (chunks - 1) * CHUNK_AU
        self._cursor = 0

    def allocate(self, units: I64) -> Allocation:
        """Room for objects of `units` units each (0 is allowed: no extent); their sum is at most `free_au`."""
        total = int(units.sum())
        assert total <= self.free_au, "the caller makes room before it allocates"
        result = Allocation(np.zeros(len(units), np.int64), np.zeros(len(units), np.int64))
        if self._take_next(units, total, result):
            return result
        if self.free_au >= SPARE * total and self._take_together(units, total, result):
            return result
        sizes = units[:1] if np.count_nonzero(units == units[0]) == len(units) else np.unique(units)
        for size in sizes.tolist():
            if size:
                self._place_equal(np.flatnonzero(units == size), size, result)
        return result

    def release(self, starts: I64, counts: I64) -> None:
        """Give runs back; all of their units are taken, and no unit occurs twice (asserted: a double free)."""
        if not len(starts):
            return
        if len(starts) <= 4:
            for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
                piece = self._free[start : start + count]
                assert len(piece) == count, "a run beyond the data area"
                assert not piece.any(), "units freed twice"
                piece[:] = 1
                self._count(start, count, 1)
            return
        units = units_of_runs(starts, counts)
        assert not self._free[units].any(), "units freed twice"
        self._free[units] = 1
        np.add.at(self._chunk_free, units // CHUNK_AU, 1)
        self.free_au += len(units)
        assert self.free_au <= self.capacity_au, "units freed twice"

    def claim(self, starts: I64, counts: I64) -> None:
        """Take certain runs: what a recovered index says is in use. All of their units are free (asserted)."""
        units = units_of_runs(starts, counts)
        assert self._free[units].all(), "a unit in two extents"
        self._mark_taken(units)

    def taken(self) -> Bools:
        """Which units are not free (a copy), for audits."""
        taken: Bools = self._free == 0
        return taken

    def check(self) -> None:
        """Assert that the counters follow from the units."""
        padded = np.zeros(len(self._chunk_free) * CHUNK_AU, np.uint8)
        padded[: self.capacity_au] = self._free
        per_chunk = padded.reshape(-1, CHUNK_AU).sum(axis=1, dtype=np.int64)
        assert (per_chunk == self._chunk_free).all(), "free units of a chunk"
        assert int(per_chunk.sum()) == self.free_au, "free units"

    def _count(self, start: int, count: int, sign: int) -> None:
        self.free_au += sign * count
        while count:
            chunk = start // CHUNK_AU
            inside = min(count, (chunk + 1) * CHUNK_AU - start)
            self._chunk_free[chunk] += sign * inside
            start += inside
            count -= inside

    def _mark_taken(self, units: I64) -> None:
        self._free[units] = 0
        np.subtract.at(self._chunk_free, units // CHUNK_AU, 1)
        self.free_au -= len(units)
        assert self.free_au >= 0, "units taken twice"

    def _take_next(self, units: I64, total: int, result: Allocation) -> bool:
        """The common case: the whole batch fits right behind the cursor."""
        start = self._cursor
        piece = self._free[start : start + total]
        if np.count_nonzero(piece) < total:
            return False
        piece[:] = 0
        self._count(start, total, -1)
        self._cursor = start + total
        result.counts[:] = units
        np.cumsum(units[:-1], out=result.starts[1:])
        result.starts += start
        result.starts[units == 0] = 0
        return True

    def _take_together(self, units: I64, total: int, result: Allocation) -> bool:
        """The next best: the whole batch fits into a run a little further on, and stays one transfer."""
        for begin, end in islice(self._windows(total), TOGETHER_WINDOWS):
            starts, counts = runs_of(self._free[begin:end])
            fitting = np.flatnonzero(counts >= total)
            if len(fitting):
                self._cursor = begin + int(starts[fitting[0]])
                return self._take_next(units, total, result)
        return False

    def _windows(self, least: int) -> Iterator[tuple[int, int]]:
        """Ranges of units that may hold runs of `least` units, from the cursor once round the area."""
        candidates = np.flatnonzero(
            self._chunk_free >= min(least, CHUNK_AU) if least > 1 else self._chunk_free
        )
        count = len(candidates)
        at = int(np.searchsorted(candidates, self._cursor // CHUNK_AU))
        turned = at + count
        while at < turned:
            first = candidates.item(at % count)
            last = first + 1
            at += 1
            while at < turned and last - first < WINDOW_CHUNKS and candidates.item(at % count) == last:
                last += 1
                at += 1
            yield first * CHUNK_AU, min(last * CHUNK_AU, self.capacity_au)

    def _place_equal(self, which: I64, size: int, result: Allocation) -> None:
        placed = 0
        for searched, (begin, end) in enumerate(self._windows(size)):
            if placed == len(which) or (searched >= SEARCH_WINDOWS and size > 1):
                break
            run_starts, run_counts = runs_of(self._free[begin:end])
            pieces = run_counts // size
            run_starts, pieces = run_starts[pieces > 0], pieces[pieces > 0]
            if not len(pieces):
                continue
            first = units_of_runs(np.zeros(len(pieces), np.int64), pieces)[: len(which) - placed]
            starts = np.repeat(run_starts, pieces)[: len(first)] + first * size + begin
            self._mark_taken((starts[:, None] + np.arange(size)).reshape(-1))
            here = which[placed : placed + len(starts)]
            result.starts[here], result.counts[here] = starts, size
            placed += len(starts)
            self._cursor = int(starts[-1]) + size
        left = which[placed:].tolist()
        for at, i in enumerate(left):
            if not self._split(i, size, result):
                # Nothing becomes free meanwhile: the others are not looked for, each would be a scan of the whole area.
                result.failed += left[at:]
                break

    def _split(self, i: int, size: int, result: Allocation) -> bool:
        runs = self._fragments(size)
        if runs is None:
            runs = self._longest_runs(size)
        if runs is None:
            return False
        starts, counts = runs
        self._mark_taken(units_of_runs(starts, counts))
        self._cursor = int(starts[-1] + counts[-1])
        result.starts[i], result.counts[i] = starts[0], counts[0]
        if len(starts) > 1:
            result.others[i] = list(zip(starts[1:].tolist(), counts[1:].tolist(), strict=True))
        return True

    def _fragments(self, size: int) -> tuple[I64, I64] | None:
        """The next free runs in the order of the cursor, if few enough hold `size` units."""
        found: list[tuple[int, int]] = []
        missing = size
        for begin, end in self._windows(1):
            starts, counts = runs_of(self._free[begin:end])
            for start, count in zip((starts[:EXTENTS_MAX] + begin).tolist(), counts.tolist(), strict=False):
                taken = min(count, missing)
                if found and sum(found[-1]) == start:
                    found[-1] = (found[-1][0], found[-1][1] + taken)
                else:
                    found.append((start, taken))
                missing -= taken
                if len(found) > EXTENTS_MAX:
                    return None
                if not missing:
                    array = np.array(found, np.int64)
                    return array[:, 0], array[:, 1]
            if len(starts) > EXTENTS_MAX:
                return None
        return None

    def _longest_runs(self, size: int) -> tuple[I64, I64] | None:
        """The longest runs of the area, in address order: a scan of all of it, so the last resort."""
        starts, counts = runs_of(self._free)
        longest = np.argsort(-counts, kind="stable")[:EXTENTS_MAX]
        reach = np.cumsum(counts[longest])
        enough = int(np.searchsorted(reach, size))
        if enough == len(longest):
            return None
        longest = longest[: enough + 1]
        taken = counts[longest]
        taken[-1] -= reach[enough] - size
        order = np.argsort(starts[longest])
        return starts[longest][order], taken[order]
