"""The part of what a card held that tells of times: when objects were stored and used, what was written, how long it may live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from .budget import HOUR_S
from .lifetimes import CLOCK_RECORD_S, record_period_s
from .records import ClockRecord
from .tenancy import TtlRow

if TYPE_CHECKING:
    from .arrays import U32
    from .image import Columns
    from .records import TtlRecord
    from .slots import SlotTable
    from .state import EngineState

TIME_S_MAX: Final = (1 << 32) - 1
WRITTEN_BYTES_MAX: Final = 1 << 62
"""No card takes so much in an hour."""


class RestoredTimes:
    """Collects times; a part of `restore.Restored`.

    Args:
        table: of the engine that it is for.
    """

    def __init__(self, table: SlotTable) -> None:
        self.ttls: dict[str, TtlRow] = {}
        """By namespace, those that were taken away included."""
        self.time_s = 0
        """The last card time that anything tells of; 0: nothing does."""
        self._table = table
        self._put_s = 0
        """The card time of the puts that follow."""
        self._hours: dict[int, int] = {}
        self._uses_known = True

    def add_ttl(self, row: TtlRow) -> None:
        """Add a rule: of two for one namespace the newer one counts."""
        before = self.ttls.get(row.namespace)
        if before is None or before.lsn < row.lsn:
            self.ttls[row.namespace] = row

    def add_clock(self, rows: Columns) -> None:
        """Add rows of `clock`."""
        for time_s, written_bytes in zip(
            rows["time_s"].tolist(), rows["written_bytes"].tolist(), strict=True
        ):
            self._note_time(min(time_s, TIME_S_MAX))
            # What nobody can have written, or not yet, a faulty program says: it does not count.
            if 0 < written_bytes <= WRITTEN_BYTES_MAX and time_s <= TIME_S_MAX:
                self._write(time_s, written_bytes)
        self._put_s = self.time_s

    def add_lives(self, rows: Columns) -> None:
        """Add rows of `lives`, after the objects that they belong to."""
        table = self._table
        inside = rows["slot"] < table.max_objects
        inside[inside] = table.generation[rows["slot"][inside]] == rows["generation"][inside]
        slots = rows["slot"][inside]
        table.stored_s[slots], table.used_s[slots] = rows["stored_s"][inside], rows["used_s"][inside]
        self._note_time(int(rows["used_s"].max(initial=0)))

    def apply(self, record: TtlRecord | ClockRecord) -> None:
        """Apply a record of the journal."""
        if isinstance(record, ClockRecord):
            self._put_s = record.time_s
            self._note_time(record.time_s)
        else:
            self.add_ttl(TtlRow(record.namespace, record.idle_s, record.total_s, record.lsn))

    def put(self, slots: U32, sizes_bytes: U32) -> None:
        """Objects were put: at the latest when the journal would have been told the time anew."""
        latest_s = self._put_s and min(self._put_s + CLOCK_RECORD_S, TIME_S_MAX)
        self._table.stored_s[slots] = self._table.used_s[slots] = latest_s
        self._write(self._put_s, int(sizes_bytes.sum(dtype=np.int64)))

    def note_uses_lost(self) -> None:
        """Tell that the run before did not end in order: what it read since its last checkpoint is not known."""
        self._uses_known = False

    def fill(self, state: EngineState, slots: U32) -> None:
        """Complete a new engine. Times that nothing tells begin now; uses that are lost count as made as late as they may have been."""
        table, now_s = self._table, np.uint32(state.lifetimes.now_s)
        stored = table.stored_s[slots]
        stored[stored == 0] = now_s
        table.stored_s[slots] = np.minimum(stored, now_s)
        used = np.maximum(table.used_s[slots], stored)
        if not self._uses_known:
            period_s = record_period_s(self.ttls.values())
            used = np.maximum(used, np.uint32(min(self.time_s + period_s, TIME_S_MAX)) if period_s else now_s)
        table.used_s[slots] = np.minimum(used, now_s)
        state.budget.restore(dict(sorted(self._hours.items())))
        state.lifetimes.restore(self.ttls.values())

    def _write(self, time_s: int, written_bytes: int) -> None:
        hour = time_s // HOUR_S
        self._hours[hour] = min(self._hours.get(hour, 0) + written_bytes, WRITTEN_BYTES_MAX)

    def _note_time(self, time_s: int) -> None:
        self.time_s = max(self.time_s, time_s)
