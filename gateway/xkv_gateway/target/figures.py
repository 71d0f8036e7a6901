"""What a target does: controllers, queue pairs, and from two samples of its counters bandwidth and latency. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from xkv_gateway.target.actual import UnreadableAnswerError

COUNTER_END: Final = 1 << 64


@dataclass(frozen=True, slots=True)
class Sample:
    """Counters of one bdev at one moment, `ticks` of which `tick_rate` make a second."""

    ticks: int
    tick_rate: int
    read_bytes: int
    write_bytes: int
    reads: int
    writes: int
    read_ticks: int
    write_ticks: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Between two samples."""

    seconds: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    reads_per_s: float
    writes_per_s: float
    read_latency_us: float | None
    """Mean; None: there were none."""
    write_latency_us: float | None


def read_sample(iostat: Any) -> Sample:
    """Read `bdev_get_iostat` for one bdev.

    Raises:
        UnreadableAnswerError: it has not the counters.
    """
    try:
        bdev = iostat["bdevs"][0]
        numbers = [
            int(iostat["ticks"]),
            int(iostat["tick_rate"]),
            *(
                int(bdev[name])
                for name in (
                    "bytes_read",
                    "bytes_written",
                    "num_read_ops",
                    "num_write_ops",
                    "read_latency_ticks",
                    "write_latency_ticks",
                )
            ),
        ]
    except (LookupError, TypeError, ValueError, OverflowError):
        raise UnreadableAnswerError(
            "the answer to bdev_get_iostat has not the counters of one bdev"
        ) from None
    if not all(0 <= number < COUNTER_END for number in numbers):
        raise UnreadableAnswerError("the answer to bdev_get_iostat holds what is no counter")
    if numbers[1] <= 0:
        raise UnreadableAnswerError("the answer to bdev_get_iostat has no clock")
    return Sample(*numbers)


def rates_between(before: Sample, after: Sample) -> Rates | None:
    """Return the rates; None where the counters began anew, or no time has passed."""
    ticks = after.ticks - before.ticks
    deltas = [
        getattr(after, name) - getattr(before, name)
        for name in ("read_bytes", "write_bytes", "reads", "writes", "read_ticks", "write_ticks")
    ]
    if ticks <= 0 or min(deltas) < 0:
        return None
    seconds = ticks / after.tick_rate
    read_bytes, write_bytes, reads, writes, read_ticks, write_ticks = deltas
    us = 1e6 / after.tick_rate
    return Rates(
        seconds,
        read_bytes / seconds,
        write_bytes / seconds,
        reads / seconds,
        writes / seconds,
        read_ticks / reads * us if reads else None,
        write_ticks / writes * us if writes else None,
    )


def count(answer: Any) -> int | None:
    """Return how many entries a list of controllers or queue pairs has; None: that is not known."""
    return len(answer) if isinstance(answer, list) else None
