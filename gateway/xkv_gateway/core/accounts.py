"""Who holds what: the totals of each scope, namespace and home. They change with the transitions of objects, and nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from .lifecycle import COMMITTING, DOOMED, LIVE, RESERVED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .arrays import I64, U32, Slots
    from .names import Home, Names, Scope

HELD: Final = frozenset({RESERVED, COMMITTING, LIVE})
CHARGED: Final = HELD | {DOOMED}
"""What counts as usage of a scope: not what is in quarantine, since that is nobody's fault."""

DENSE: Final = 4
"""Homes are counted by their number, instead of sorted, where there are at most so many numbers for each slot."""


class Accounts:
    """Follows the slot table.

    Args:
        names: where the totals are kept.
        home: the home of each slot.
    """

    def __init__(self, names: Names, home: U32) -> None:
        self._names = names
        self._home = home
        self.watch: Callable[[Scope], None] | None = None
        """Told of a scope that holds more than before, or of which more can be evicted."""

    def by_home(self, slots: Slots, units: I64) -> Iterator[tuple[Home, int, int]]:
        """The homes of some slots, each with how many objects and units are its."""
        idents = self._home.take(slots)
        if len(idents) < 2 or np.count_nonzero(idents == idents[0]) == len(idents):
            if len(idents):
                yield self._names.home(int(idents[0])), len(idents), int(units.sum())
            return
        top = int(idents.max()) + 1
        if top <= DENSE * len(idents):
            counts = np.bincount(idents, minlength=top)
            unique = np.flatnonzero(counts)
            counts, sums = counts[unique], np.bincount(idents, units, top)[unique]
        else:
            unique, of_slot = np.unique(idents, return_inverse=True)
            counts, sums = np.bincount(of_slot), np.bincount(of_slot, units)
        # Sums of units are exact in a double: far below 2^53.
        for ident, count, au in zip(unique.tolist(), counts.tolist(), sums.tolist(), strict=True):
            yield self._names.home(ident), count, int(au)

    def shift(self, slots: Slots, units: I64, before: int, after: int) -> None:
        """Slots moved from one state to another."""
        charge = (after in CHARGED) - (before in CHARGED)
        hold = (after in HELD) - (before in HELD)
        live = (after == LIVE) - (before == LIVE)
        if not (charge or hold or live):
            return
        rises = self.watch if live > 0 or hold > 0 else None
        for home, count, au in self.by_home(slots, units):
            scope, space = home.scope, home.namespace
            if charge:
                scope.charged_au += charge * au
                home.charged_au += charge * au
                space.charged_au += charge * au
            if hold:
                scope.held_au += hold * au
                scope.members += hold * count
            if live:
                scope.live_au += live * au
                scope.live_objects += live * count
                home.live_objects += live * count
                space.live_objects += live * count
            if rises is not None:
                rises(scope)

    def guard(self, slots: Slots, units: I64, sign: int) -> None:
        """Live slots got their first guard, or lost their last one."""
        for home, count, au in self.by_home(slots, units):
            scope = home.scope
            scope.guarded_live_au += sign * au
            scope.guarded_live_objects += sign * count
            if sign < 0 and self.watch is not None:
                self.watch(scope)

    def pend(self, slots: Slots, units: I64, sign: int) -> None:
        """Doomed slots wait for nothing but their tombstone, or do not any more."""
        for home, _, au in self.by_home(slots, units):
            home.scope.pending_au += sign * au
