"""What the parts of the engine share. The state is whole between two calls of the engine."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .accounts import Accounts
from .allocator import Allocator
from .budget import Budget
from .counters import Counters
from .digest import Digester
from .index import Index
from .leases import Leases
from .lifetimes import Lifetimes
from .names import Names
from .quotas import Quotas
from .recency import Recency
from .records import RecordLog
from .slots import SlotTable
from .types import Extent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .arrays import Bools, Slots
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
        self.limits = limits
        self.rules = limits.eviction
        """The rules of eviction that hold now; see `Engine.set_rules`."""
        self.slots = slots or SlotTable(limits.max_objects, limits.capacity_au, limits.au_bytes)
        self.index = Index(limits.max_objects, self.slots.digest_low, self.slots.digest_high)
        self.allocator = Allocator(limits.capacity_au)
        self.digester = Digester(digest_secret)
        self.names = Names()
        self.accounts = self.slots.accounts = Accounts(self.names, self.slots.home)
        self.recency = Recency(limits.max_objects)
        self.leases = Leases()
        self.log = RecordLog()
        self.counters = Counters()
        self.quotas = Quotas(self.names, limits, self.log)
        self.lifetimes = Lifetimes(self.slots, self.names, self.log)
        self.budget = Budget(limits.written_bytes_per_day)
        self.wiping = False
        """Whether objects of condemned homes may still be in the index."""

    def drop_references(self, slots: Slots) -> None:
        """Slots became absent: the last reference removes a home, its namespace and its scope."""
        for home, count, _ in list(self.accounts.by_home(slots, self.slots.units(slots))):
            self.drop_reference(home, count)

    def drop_reference(self, home: Home, count: int) -> None:
        """References to a home end."""
        scope = home.scope
        if self.names.release(home, count):
            self.recency.drop_log(scope.uses, self._living_logs)

    def visible(self, slots: Slots, namespace: str, scope: bytes) -> Bools:
        """Which slots of this identity's digests were not condemned by a wipe that is still going through the index."""
        home = self.names.find(namespace, scope)
        if home is None:
            return np.zeros(len(slots), np.bool_)
        same: Bools = self.slots.home.take(slots) == home.ident
        return same

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
        return ((scope.uses, scope.ident) for scope in self.names.scopes.values())
