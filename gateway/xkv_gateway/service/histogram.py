"""A histogram that costs a search among a dozen numbers: counts below bounds, and a sum. Pure."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Histogram:
    """Counts of values by size. Values and bounds are integers in one unit."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[int]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0
        """Sum of the values."""

    def add(self, value: int, weight: int = 1) -> None:
        """Count a value, `weight` times."""
        self.counts[bisect_left(self.bounds, value)] += weight
        self.total += value * weight

    def buckets(self, unit: float) -> list[tuple[str, float]]:
        """Return Prometheus' buckets: (upper bound divided by `unit`, values up to it); the last one is +Inf."""
        names = [*(repr(bound / unit) for bound in self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))


class PowerHistogram:
    """A histogram of durations whose bounds are powers of two: the bucket of a value is its number of bits.

    `counts[bits] += 1` and `total += value`, written where the value is, cost less than a call.
    """

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * 65
        self.total = 0

    def add(self, value: int) -> None:
        """Count a value of at most 64 bits."""
        self.counts[value.bit_length()] += 1
        self.total += value

    def buckets(self, least_bits: int, most_bits: int, unit: float) -> list[tuple[str, float]]:
        """Return Prometheus' buckets with the bounds 2^least_bits to 2^most_bits, and +Inf."""
        sums = list(accumulate(self.counts))
        bounds = range(least_bits, most_bits + 1)
        return [*((repr(2**bits / unit), sums[bits]) for bits in bounds), ("+Inf", sums[-1])]
