"""The budget of bytes that stores may write to the card within a day, so that a medium with a limited life lasts.

A day is the last 24 hours, hour by hour of card time: what was written in an hour counts until 24 hours after its beginning.
Counted are payload bytes, when their store is admitted; also those of a store that fails afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

HOUR_S: Final = 3600
DAY_HOURS: Final = 24


class Budget:
    """What was written, by hours.

    Args:
        bytes_per_day: what may be written; 0: everything.
    """

    def __init__(self, bytes_per_day: int) -> None:
        self.bytes_per_day = bytes_per_day
        self.hours: dict[int, int] = {}
        """By hour since 1970 (card time), at most DAY_HOURS."""
        self._sum = 0

    def restore(self, hours: Mapping[int, int]) -> None:
        """Begin with what earlier runs have written."""
        self.hours = dict(hours)
        self._sum = sum(hours.values())

    def spend(self, written_bytes: int, now_s: int) -> None:
        """Note that so much is written."""
        hour = now_s // HOUR_S
        if hour not in self.hours:
            self._forget(hour)
        self.hours[hour] = self.hours.get(hour, 0) + written_bytes
        self._sum += written_bytes

    def written(self, now_s: int) -> int:
        """What was written within the day."""
        self._forget(now_s // HOUR_S)
        return self._sum

    def left(self, now_s: int) -> int | None:
        """What may still be written now; None: everything."""
        if not self.bytes_per_day:
            return None
        return max(0, self.bytes_per_day - self.written(now_s))

    def _forget(self, hour: int) -> None:
        """Hours that are over their day."""
        while self.hours and (oldest := next(iter(self.hours))) <= hour - DAY_HOURS:
            self._sum -= self.hours.pop(oldest)
