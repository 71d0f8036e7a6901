"""Which scope gives first when the card is full though nobody is over its quota.

The card is shared in proportion to the limits of the scopes that use it, so the scope that is most over its fair share is
the one that uses the greatest part of its limit: the one with the greatest *fullness*, whatever the sum of all limits is. A
scope without a limit counts as if it had the whole card. What is doomed already is not counted.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .names import Names, Scope

HEAP_SLACK: Final = 256


class FairOrder:
    """Scopes by fullness, the greatest first: a heap of upper bounds, brought up to date when they are met.

    Args:
        names: the scopes in use.
        capacity_au: of the card.
    """

    def __init__(self, names: Names, capacity_au: int) -> None:
        self._names = names
        self._capacity_au = capacity_au
        self._heap: list[tuple[float, int]] = []

    def fullness(self, scope: Scope, more_au: int = 0) -> float:
        """What part of its limit a scope uses, or would use with `more_au`."""
        limit_au = self._capacity_au if scope.limit_au is None else scope.limit_au
        if limit_au:
            return (scope.held_au + more_au) / limit_au
        return math.inf

    def list(self, scope: Scope) -> None:
        """See to it that the scope is listed under at least its fullness."""
        fullness = self.fullness(scope)
        if scope.listed is None or fullness > scope.listed:
            scope.listed = fullness
            heapq.heappush(self._heap, (-fullness, scope.ident))
            if len(self._heap) > HEAP_SLACK + 4 * len(self._names.scopes):
                self._rebuild()

    def fullest(self, asking: Scope | None, more_au: int) -> Scope | None:
        """The scope that gives: the fullest that has anything to give. `asking` counts with what it asks for, and loses ties."""
        heap = self._heap
        while heap:
            bound, ident = heap[0]
            scope = self._names.scope_at(ident)
            if scope is None or scope.listed != -bound:
                heapq.heappop(heap)
            elif scope.live_objects == scope.guarded_live_objects:
                # Listed again when a guard of it ends or more becomes live.
                heapq.heappop(heap)
                scope.listed = None
            elif (fullness := self.fullness(scope)) < -bound:
                scope.listed = fullness
                heapq.heapreplace(heap, (-fullness, ident))
            else:
                return asking if asking is not None and self._outdoes(asking, more_au, fullness) else scope
        return None

    def _outdoes(self, asking: Scope, more_au: int, fullness: float) -> bool:
        able = asking.live_objects > asking.guarded_live_objects
        return able and self.fullness(asking, more_au) >= fullness

    def _rebuild(self) -> None:
        listed = ((scope.listed, scope.ident) for scope in self._names.scopes.values())
        self._heap = [(-bound, ident) for bound, ident in listed if bound is not None]
        heapq.heapify(self._heap)
