"""Wipes: all of a namespace, or of one scope in it, at once for whoever looks, and then bit by bit in the tables.

    wipe     homes are condemned (one step, whatever they hold), the record is made: invisible from here on
    step     slots are gone through, a bounded number a call: what is in a condemned home is doomed, its writers cancelled
    ready    no lease, no I/O, tombstone durable: instead of becoming free the units wait to be erased
    erased   the shell has deallocated them and read them back: free

What a condemned home holds is in the state that it would have anyway: doomed, or quarantined while a write may land. So a
crash in the middle leaves doomed rows, and whoever reads them goes on.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from .arrays import NO_SLOTS
from .lifecycle import ABSENT, COMMITTING, LIVE, RESERVED
from .records import DeleteCause, WipeRecord
from .state import rows
from .tenancy import WipeCounts
from .types import ErasePlan, WipeOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from .arrays import U8, Bools, Slots
    from .names import Home
    from .removal import Removal
    from .state import EngineState
    from .types import Lsn

SCAN_SLOTS: Final = 1 << 16
"""Slots looked at in one call: a millisecond or so where nothing of them is wiped."""
DOOM_SLOTS: Final = 2048
"""... and doomed in one call: two or three milliseconds."""
RESUMED: Final = 0
"""Id of what wipes of an earlier run have left."""
ENDED_MAX: Final = 64
"""Wipes that are remembered after their end."""


class Wiping:
    """The wipes of one engine."""

    def __init__(self, state: EngineState, removal: Removal) -> None:
        self._state = state
        self._removal = removal
        self.wipes: dict[int, WipeCounts] = {}
        """By id, oldest first; ended ones are forgotten when there are many."""
        self._passes: deque[list[int]] = deque()
        """[next slot, last slot, the wipe that it completes]."""
        self._ready: deque[Slots] = deque()
        self.news = False
        """Whether there is something for the eraser to see since it last looked; it takes the flag back."""
        removal.on_ready = self._on_ready
        removal.mark = self._mark

    # --- the engine's side ----------------------------------------------------------------------------------

    def wipe(self, namespace: str, scope: bytes | None, *, erase: bool) -> WipeOutcome:
        """See `Engine.wipe`."""
        state = self._state
        ident = state.log.next_lsn()
        counts = WipeCounts(ident, namespace, scope, erase)
        state.log.add(WipeRecord(ident, namespace, scope))
        self._remember(counts)
        self.news = True
        if state.names.condemn(namespace, scope, ident):
            self._passes.append([0, state.slots.fresh, ident])
            state.wiping = True
            self.step()
        else:
            counts.scanned = True
        return WipeOutcome(counts, state.log.unless_durable(state.log.last_lsn))

    def step(self) -> None:
        """Go on, a bounded amount."""
        if not self._passes:
            return
        table = self._state.slots
        current = self._passes[0]
        first, end, ident = current
        last = min(first + SCAN_SLOTS, end)
        slots = np.flatnonzero(table.state[first:last] != ABSENT) + first
        slots = slots[self.condemned(slots) & ~table.must_erase[slots]]
        slots = slots[_open(table.state[slots]) | self._erases(slots)]
        if len(slots) > DOOM_SLOTS:
            slots = slots[:DOOM_SLOTS]
            last = int(slots[-1]) + 1
        self._take_away(slots)
        current[0] = last
        if last == end:
            self._passes.popleft()
            self.wipes[ident].scanned = True
            self.news = True
            self._state.wiping = bool(self._passes)

    @property
    def under_way(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._passes)

    def condemned(self, slots: Slots) -> Bools:
        """Which slots (not ABSENT) are in condemned homes."""
        return self._by_home(slots, lambda home: home.condemned)

    def forsake(self, slots: Slots) -> None:
        """These (in the index, condemned) are in the way of new ones of the same identity: doom them now."""
        self._take_away(slots)

    def record_again(self, namespace: str, scope: bytes | None) -> Lsn:
        """Record a wipe that recovery has carried out and the journal lacks, before anything is put."""
        return self._state.log.add(WipeRecord(self._state.log.next_lsn(), namespace, scope))

    def restore(self, slots: Slots) -> None:
        """Begin with doomed objects (in homes condemned by RESUMED) that an earlier run wiped and did not erase."""
        if len(slots):
            self._state.slots.tombstoned[slots] = True
            self.news = True
            self._remember(WipeCounts(RESUMED, "", None, erase=True, scanned=True))
            self._mark(slots)

    # --- the eraser's side ----------------------------------------------------------------------------------

    def take_erasable(self, objects_max: int, units_max: int) -> list[ErasePlan]:
        """Objects whose units are to be erased; each is handed out once, and ended by `erased` or `not_erased`.

        At most `objects_max`, and no more of them than `units_max` units take, but one in any case.
        """
        parts: list[Slots] = []
        missing, state = objects_max, self._state
        while self._ready and missing:
            part = self._ready.popleft()
            fit = int(np.searchsorted(np.cumsum(state.slots.units(part)), units_max, "right"))
            count = min(missing, max(fit, 0 if parts else 1))
            if count < len(part):
                self._ready.appendleft(part[count:])
                missing = count
            parts.append(part[:count])
            units_max -= int(state.slots.units(part[:count]).sum())
            missing -= count
        slots = np.concatenate(parts) if parts else NO_SLOTS
        if not len(slots):
            return []
        idents = [state.names.home(ident).wiped_by for ident in state.slots.home[slots].tolist()]
        generations = state.slots.generation[slots].tolist()
        return list(rows(ErasePlan, slots.tolist(), generations, idents, state.extents_of(slots)))

    def erased(self, plans: list[ErasePlan]) -> None:
        """The units of these hold zeroes, durably: they are free."""
        slots = self._slots_of(plans)
        for counts, count, au in self._by_wipe(slots):
            counts.left_objects -= count
            counts.left_au -= au
            counts.ready_au -= au
            counts.erased_au += au
        self._state.counters.erased += len(slots)
        self._state.slots.must_erase[slots] = False
        self._removal.erased(slots)

    def not_erased(self, plans: list[ErasePlan]) -> None:
        """It did not work out; they come again."""
        self._ready.append(self._slots_of(plans))

    # --- inside ---------------------------------------------------------------------------------------------

    def _slots_of(self, plans: list[ErasePlan]) -> Slots:
        table = self._state.slots
        slots = np.array([plan.slot for plan in plans], np.intp)
        generations = np.array([plan.generation for plan in plans], np.uint32)
        current = (table.generation[slots] == generations) & table.must_erase[slots]
        assert current.all(), "erased what was not handed out"
        return slots

    def _take_away(self, slots: Slots) -> None:
        if not len(slots):
            return
        table = self._state.slots
        self._mark(slots)
        reserved = table.state[slots] == RESERVED
        visible = slots[np.isin(table.state[slots], (COMMITTING, LIVE))]
        for home, count, size_bytes in self._state.accounts.by_home(
            visible, table.size_bytes[visible].astype(np.int64)
        ):
            counts = self.wipes[home.wiped_by]
            counts.objects += count
            counts.payload_bytes += size_bytes
        self._state.counters.wiped += len(visible)
        self._removal.doom(visible, DeleteCause.WIPED)
        if reserved.any():
            self._removal.cancel(slots[reserved])

    def _mark(self, slots: Slots) -> None:
        """Objects of condemned homes are about to go, or are going: from here on their units must be erased."""
        table = self._state.slots
        slots = slots[self._erases(slots) & ~table.must_erase[slots]]
        if not len(slots):
            return
        self._removal.no_longer_pending(slots)
        table.must_erase[slots] = True
        for counts, count, au in self._by_wipe(slots):
            counts.left_objects += count
            counts.left_au += au

    def _on_ready(self, slots: Slots) -> None:
        self._ready.append(slots)
        self.news = True
        for counts, _, au in self._by_wipe(slots):
            counts.ready_au += au

    def _by_wipe(self, slots: Slots) -> list[tuple[WipeCounts, int, int]]:
        state = self._state
        return [
            (self.wipes[home.wiped_by], count, au)
            for home, count, au in state.accounts.by_home(slots, state.slots.units(slots))
        ]

    def _erases(self, slots: Slots) -> Bools:
        return self._by_home(slots, self._home_erases)

    def _home_erases(self, home: Home) -> bool:
        counts = self.wipes.get(home.wiped_by) if home.condemned else None
        return counts is not None and counts.erase

    def _by_home(self, slots: Slots, judge: Callable[[Home], bool]) -> Bools:
        if not len(slots):
            return np.zeros(0, np.bool_)
        unique, of_slot = np.unique(self._state.slots.home[slots], return_inverse=True)
        judged = np.array([judge(self._state.names.home(ident)) for ident in unique.tolist()], np.bool_)
        result: Bools = judged[of_slot]
        return result

    def _remember(self, counts: WipeCounts) -> None:
        ended = [ident for ident, each in self.wipes.items() if each.done and each.ident != RESUMED]
        for ident in ended[: max(0, len(ended) - ENDED_MAX)]:
            del self.wipes[ident]
        self.wipes[counts.ident] = counts


def _open(states: U8) -> Bools:
    """Which states are in the index."""
    result: Bools = np.isin(states, (RESERVED, COMMITTING, LIVE))
    return result
