"""When to try again, and how much to say about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

_REPEAT_NS: Final = 60_000_000_000
_CHANGE_NS: Final = 20_000_000_000


class Backoff:
    """Doubling delays between a least and a most, the upper half of each random."""

    def __init__(self, min_ms: int, max_ms: int, entropy: Callable[[int], bytes]) -> None:
        self._min_ms = min_ms
        self._max_ms = max_ms
        self._entropy = entropy
        self._next_ms = min_ms

    def reset(self) -> None:
        """The last attempt succeeded."""
        self._next_ms = self._min_ms

    def give_time(self) -> None:
        """Only a person can mend what is wrong: wait as long as ever before the next attempt."""
        self._next_ms = self._max_ms

    def next_s(self) -> float:
        """Return the delay before the next attempt, in seconds."""
        whole_ms = self._next_ms
        self._next_ms = min(whole_ms * 2, self._max_ms)
        share = int.from_bytes(self._entropy(2), "little") / 0xFFFF
        return whole_ms * (0.5 + share / 2) / 1000


class ReconnectLog:
    """Logs the first failure, then a changed reason at most every 20 s and the same one every 60 s."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], int]) -> None:
        self._logger = logger
        self._clock = clock
        self._last: tuple[int, str] | None = None
        self._silent = 0
        self._recovered = False

    def failure(self, reason: str) -> None:
        """An attempt failed."""
        now_ns = self._clock()
        if self._last is not None:
            at_ns, before = self._last
            if now_ns - at_ns < (_REPEAT_NS if reason == before else _CHANGE_NS):
                self._silent += 1
                return
        extra = f" ({self._silent} more attempts)" if self._silent else ""
        self._logger.warning("card: %s%s", reason, extra)
        self._last = (now_ns, reason)
        self._silent = 0
        self._recovered = False

    def lost(self, reason: str, *, closing: bool) -> None:
        """The association ended."""
        if not closing:
            self.failure(f"association lost: {reason}")

    def success(self) -> None:
        """An attempt succeeded after failures that were told of."""
        if self._last is not None and not self._recovered:
            self._logger.info("connected again")
            self._recovered = True
