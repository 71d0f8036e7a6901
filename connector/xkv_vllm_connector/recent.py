"""Which objects are known to be held already: remembered for a while. Pure.

A prompt that everybody shares would be stored again by every request otherwise.
"""

from __future__ import annotations

from typing import Generic, TypeVar

_K = TypeVar("_K")


class Recent(Generic[_K]):
    """A set that forgets: two generations, exchanged after a time or when the younger one is full."""

    def __init__(self, entries_max: int, lifetime_ns: int) -> None:
        """Make an empty one.

        Args:
            entries_max: Entries of one generation.
            lifetime_ns: An entry is forgotten between one and two of these after it was added.
        """
        self._entries_max = entries_max
        self._lifetime_ns = lifetime_ns
        self._young: set[_K] = set()
        self._old: set[_K] = set()
        self._turned_ns: int | None = None

    def __contains__(self, entry: _K) -> bool:
        return entry in self._young or entry in self._old

    def add(self, entry: _K, now_ns: int) -> None:
        """Remember an entry."""
        self.turn(now_ns)
        self._young.add(entry)

    def turn(self, now_ns: int) -> None:
        """Let time pass."""
        if self._turned_ns is None:
            self._turned_ns = now_ns
        late_ns = now_ns - self._turned_ns
        if late_ns >= self._lifetime_ns or len(self._young) >= self._entries_max:
            self._old = self._young if late_ns < 2 * self._lifetime_ns else set()
            self._young = set()
            self._turned_ns = now_ns
