"""What the parts of the engine share. The state is whole between two calls of the engine."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .allocator import Allocator
from .counters import Counters
from .digest import Digester
from .index import Index
from .leases import Leases
from .names import Names
from .recency import Recency
from .records import RecordLog
from .slots import SlotTable
from .types import Extent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .arrays import Slots
    from .names import Home
    from .recency import UseLog
    from .types import EngineLimits


_Row = TypeVar("_Row", bound=tuple[Any, ...])


def rows(kind: type[_Row], *columns: Iterable[object]) -> Iterator[_Row]:
    """Named tuples out of columns, made without a Python call for each: plans are made by the thousand."""
    return map(partial(tuple.__new__, kind), zip(*columns, strict=True))


class EngineState:
    """The tables, and the few things that concern more than one of them."""

    def __init__(self, limits: EngineLimits, digest_secret: bytes, slots: SlotTable | None = None) -> None:
        assert 0 < limits.object_bytes_max < 2**32, "sizes are kept in 32 bits"
        assert 0 < limits.leases_per_scope_max < 2**16, "leases of an object are counted in 16 bits"
        assert 0 < limits.eviction_low_watermark <= limits.eviction_high_watermark <= 1
        self.limits = limits
        self.slots = slots or SlotTable(limits.max_objects, limits.capacity_au, limits.au_bytes)
        self.index = Index(limits.max_objects, self.slots.digest_low, self.slots.digest_high)
        self.allocator = Allocator(limits.capacity_au)
        self.digester = Digester(digest_secret)
        self.names = Names()
        self.recency = Recency(limits.max_objects)
        self.leases = Leases()
        self.log = RecordLog()
        self.counters = Counters()

    def homes_of(self, slots: Slots) -> Iterator[tuple[Home, int]]:
        """The homes of some slots, each with how many of the slots are its."""
        idents = self.slots.home[slots]
        if len(idents) and np.count_nonzero(idents == idents[0]) == len(idents):
            yield self.names.home(int(idents[0])), len(idents)
            return
        unique, counts = np.unique(idents, return_counts=True)
        for ident, count in zip(unique.tolist(), counts.tolist(), strict=True):
            yield self.names.home(ident), count

    def drop_references(self, home: Home, count: int) -> None:
        """References to a home end; the last one removes it."""
        self.names.release(home, count)
        if not home.references:
            self.recency.drop_home(home.uses, self._living_logs)

    def extents_of(self, slots: Slots) -> list[tuple[Extent, ...]]:
        """The extents of each slot; none where the object is empty."""
        table = self.slots
        starts, counts = table.start_au[slots].tolist(), table.count_au[slots].tolist()
        runs = rows(Extent, starts, counts)
        extents: list[tuple[Extent, ...]] = [(run,) if run[1] else () for run in runs]
        if table.others:
            for i, slot in enumerate(slots.tolist()):
                if slot in table.others:
                    extents[i] += table.others[slot]
        return extents

    def _living_logs(self) -> Iterator[tuple[UseLog, int]]:
        return ((home.uses, home.ident) for home in self.names.homes if home is not None)
