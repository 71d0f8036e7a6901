"""Leases: a client's promise to read soon, over all hits of one lookup.

A lease is bound to the generation of each of its objects within one home. It ends by release, or by itself when its time
is over: `find` goes by the clock that it is given, not by whether anyone has cleaned up yet.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from .arrays import U32, U64, Bools, Slots
    from .names import Home
    from .types import LeaseId

HEAP_SLACK: Final = 64


class Lease:
    """One lease. `slots` has no repetitions."""

    __slots__ = (
        "_high",
        "_low",
        "_order",
        "deadline_ns",
        "generations",
        "home",
        "ident",
        "leased_bytes",
        "slots",
    )

    def __init__(
        self, ident: LeaseId, home: Home, slots: Slots, generations: U32, leased_bytes: int, deadline_ns: int
    ) -> None:
        self.ident = ident
        self.home = home
        self.slots = slots
        self.generations = generations
        self.leased_bytes = leased_bytes
        self.deadline_ns = deadline_ns
        self._order: np.ndarray[tuple[int], np.dtype[np.intp]] | None = None
        self._low: U64 | None = None
        self._high: U64 | None = None

    def covered(self, low: U64, high: U64, digest_low: U64, digest_high: U64) -> tuple[Slots, Bools]:
        """Slot of each digest within the lease, and whether it is covered (where not, the slot means nothing)."""
        if self._order is None or self._low is None or self._high is None:
            # A lease holds its slots, so their digests stay what they are: sorted once, for all loads.
            own = digest_low[self.slots]
            self._order = np.argsort(own)
            self._low = own[self._order]
            self._high = digest_high[self.slots][self._order]
        at = np.searchsorted(self._low, low)
        np.minimum(at, len(self._low) - 1, out=at)
        found = (self._low[at] == low) & (self._high[at] == high)
        return self.slots[self._order[at]], found


class Leases:
    """All leases that have not been cleaned up."""

    def __init__(self) -> None:
        self.by_id: dict[LeaseId, Lease] = {}
        self._heap: list[tuple[int, LeaseId]] = []

    def add(self, lease: Lease) -> None:
        """Enter a new lease and count it for its home and scope."""
        assert lease.ident not in self.by_id, "a lease id occurs twice"
        home = lease.home
        self.by_id[lease.ident] = lease
        if home.leases is None:
            home.leases = {}
        home.leases[lease.ident] = lease
        home.references += 1
        home.scope.leases += 1
        home.scope.leased_bytes += lease.leased_bytes
        self._push(lease)

    def find(self, ident: LeaseId, now_ns: int) -> Lease | None:
        """The lease, if its time is not over."""
        lease = self.by_id.get(ident)
        return lease if lease is not None and lease.deadline_ns > now_ns else None

    def prolong(self, lease: Lease, deadline_ns: int) -> None:
        """Move the end of a lease; its entry in the heap follows when it comes up."""
        if deadline_ns < lease.deadline_ns:
            lease.deadline_ns = deadline_ns
            self._push(lease)
        else:
            lease.deadline_ns = deadline_ns

    def remove(self, lease: Lease) -> None:
        """Take a lease out again. The caller drops the reference to its home."""
        home = lease.home
        del self.by_id[lease.ident]
        assert home.leases is not None
        del home.leases[lease.ident]
        if not home.leases:
            home.leases = None
        home.scope.leases -= 1
        home.scope.leased_bytes -= lease.leased_bytes
        if len(self._heap) > HEAP_SLACK + 2 * len(self.by_id):
            self._heap = [(each.deadline_ns, each.ident) for each in self.by_id.values()]
            heapq.heapify(self._heap)

    def due(self, now_ns: int) -> Lease | None:
        """A lease whose time is over, or None."""
        deadline_ns = self.next_deadline()
        if deadline_ns is None or deadline_ns > now_ns:
            return None
        return self.by_id[self._heap[0][1]]

    def next_deadline(self) -> int | None:
        """When the next lease ends."""
        while self._heap:
            deadline_ns, ident = self._heap[0]
            lease = self.by_id.get(ident)
            if lease is not None and lease.deadline_ns == deadline_ns:
                return deadline_ns
            heapq.heappop(self._heap)
            if lease is not None and lease.deadline_ns > deadline_ns:
                self._push(lease)
        return None

    def _push(self, lease: Lease) -> None:
        heapq.heappush(self._heap, (lease.deadline_ns, lease.ident))
