"""How long objects may live: what each namespace allows, when objects were stored and last used, and which are over their time.

All of it is told in *card time*: seconds that only go forward. They begin at the wall clock of the first start, follow the
monotonic clock while a gateway runs (so nothing that happens to the wall clock then matters), and between two runs the
wall clock again, within bounds (`resumed_s`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from .records import ClockRecord, TtlRecord
from .tenancy import TtlRow
from .types import NO_LSN

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .arrays import I64, Bools, Slots
    from .names import Names
    from .records import RecordLog
    from .slots import SlotTable
    from .types import Lsn

NS_PER_S: Final = 1_000_000_000
AWAY_S_MAX: Final = 86_400
"""Of the time between two runs so much counts at most: a clock that is wrong must not age everything at once."""
CLOCK_RECORD_S: Final = 10
"""The journal is told the time at most so often: what it says of when an object was stored is exact to this."""
RECORDS_PER_IDLE: Final = 4
RECORD_S_MAX: Final = 600
"""Where there is a rule on idleness the journal is told the time so many times within it, and at least so often."""
RULES_MAX: Final = 256
"""Namespaces with a rule."""
ROUNDED_S: Final = 1
"""Card times are rounded down to seconds: with one more it is certain that the time is over, and never too early."""
NO_END: Final = 1 << 40
"""Later than every card time."""


def resumed_s(last_s: int, wall_s: int) -> int:
    """Return the card time with which a run begins.

    Args:
        last_s: the last card time that the card knows of; 0: none.
        wall_s: seconds since 1970, as this host says.
    """
    if not last_s:
        return wall_s
    return last_s + min(max(0, wall_s - last_s), AWAY_S_MAX)


def record_period_s(rules: Iterable[TtlRow]) -> int:
    """Return how often the journal is told the time because of rules on idleness; 0: there are none."""
    idle_s = min((rule.idle_s for rule in rules if rule.idle_s), default=0)
    return idle_s and max(CLOCK_RECORD_S, min(idle_s // RECORDS_PER_IDLE, RECORD_S_MAX))


class Lifetimes:
    """The rules of one engine, and its card time.

    Args:
        table: the objects; they have their times in there.
        names: the namespaces in use.
        log: where changes are recorded.
    """

    def __init__(self, table: SlotTable, names: Names, log: RecordLog) -> None:
        self.rules: dict[str, TtlRow] = {}
        """By namespace."""
        self.removed: dict[str, TtlRow] = {}
        """Rules that were taken away; kept until no checkpoint can bring them back (`forget_removed`)."""
        self.changed = False
        """Whether rules have changed since the last pass began; the pass takes the flag back."""
        self.now_s = 0
        self._table = table
        self._names = names
        self._log = log
        self._base_s = 0
        self._base_ns: int | None = None
        self._recorded_s = 0

    # --- time -----------------------------------------------------------------------------------------------

    def begin(self, time_s: int) -> None:
        """Begin with this card time."""
        self.now_s = self._base_s = time_s

    def advance(self, now_ns: int) -> None:
        """Go on to this moment (monotonic)."""
        if self._base_ns is None:
            self._base_ns = now_ns
        self.now_s = max(self.now_s, self._base_s + (now_ns - self._base_ns) // NS_PER_S)

    def at_ns(self, time_s: int) -> int:
        """The monotonic time of a card time."""
        return (self._base_ns or 0) + (time_s - self._base_s) * NS_PER_S

    def record_time(self) -> None:
        """Tell the journal the time, unless it was told a moment ago; puts that follow were stored then."""
        if self.now_s - self._recorded_s >= CLOCK_RECORD_S:
            self._recorded_s = self.now_s
            self._log.add(ClockRecord(self._log.next_lsn(), self.now_s))

    # --- rules ----------------------------------------------------------------------------------------------

    def set(self, namespace: str, idle_s: int, total_s: int) -> Lsn:
        """Set the rule of a namespace; 0: no such limit, both 0: no rule.

        Returns:
            The LSN of the record, or NO_LSN where nothing changes.
        """
        before = self.rules.get(namespace)
        if (idle_s, total_s) == ((0, 0) if before is None else (before.idle_s, before.total_s)):
            return NO_LSN
        lsn = self._log.add(TtlRecord(self._log.next_lsn(), namespace, idle_s, total_s))
        self._enter(TtlRow(namespace, idle_s, total_s, lsn))
        return lsn

    def record_again(self) -> None:
        """Record all rules anew: the journal may lack some of them."""
        for row in self.rows():
            lsn = self._log.add(TtlRecord(self._log.next_lsn(), row.namespace, row.idle_s, row.total_s))
            self._enter(TtlRow(row.namespace, row.idle_s, row.total_s, lsn))

    def restore(self, rows: Iterable[TtlRow]) -> None:
        """Begin with what a card held."""
        for row in rows:
            self._enter(row)

    def rows(self) -> list[TtlRow]:
        """All rules as they are kept on the card, those that were taken away included."""
        return [*self.rules.values(), *self.removed.values()]

    def forget_removed(self, before_lsn: int) -> None:
        """Nothing that is ever replayed begins before this LSN."""
        self.removed = {name: row for name, row in self.removed.items() if row.lsn >= before_lsn}

    def _enter(self, row: TtlRow) -> None:
        self.changed = True
        if row.idle_s or row.total_s:
            self.rules[row.namespace] = row
            self.removed.pop(row.namespace, None)
        else:
            self.rules.pop(row.namespace, None)
            self.removed[row.namespace] = row

    # --- who is over ----------------------------------------------------------------------------------------

    def over(self, namespace: str, slots: Slots) -> Bools | None:
        """Which slots of a namespace are over their time; None: it has no rule."""
        rule = self.rules.get(namespace)
        if rule is None:
            return None
        ends = self._ends(slots, rule.idle_s or NO_END, rule.total_s or NO_END)
        over: Bools = ends <= self.now_s
        return over

    def ends_s(self, slots: Slots) -> I64:
        """When each of these (in use) is over its time, by the rule of its namespace; NO_END or later: never."""
        names = self._names
        idle = np.full(names.namespaces_end, NO_END, np.int64)
        total = np.full(names.namespaces_end, NO_END, np.int64)
        for rule in self.rules.values():
            space = names.namespaces.get(rule.namespace)
            if space is not None:
                idle[space.ident] = rule.idle_s or NO_END
                total[space.ident] = rule.total_s or NO_END
        spaces = names.space_of_home.take(self._table.home.take(slots))
        return self._ends(slots, idle.take(spaces), total.take(spaces))

    def _ends(self, slots: Slots, idle_s: I64 | int, total_s: I64 | int) -> I64:
        table = self._table
        ends: I64 = np.minimum(
            table.used_s.take(slots).astype(np.int64) + idle_s,
            table.stored_s.take(slots).astype(np.int64) + total_s,
        )
        ends += ROUNDED_S
        return ends
