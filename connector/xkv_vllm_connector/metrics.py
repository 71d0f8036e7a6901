"""What the connector counts, and how it is added up and shown. Pure.

Both sides count; the engine adds the counts of all ranks together and shows them on its own `/metrics`.
"""

from __future__ import annotations

from typing import Any, Final

COUNTERS: Final[dict[str, str]] = {
    "lookups": "Questions to the gateway about a prompt",
    "lookups_ahead": "Prompts about which it was asked, before their turn, whether the gateway has anything of them",
    "lookups_skipped": "Questions not asked because the gateway did not answer before",
    "lookups_failed": "Questions without an answer in time",
    "hit_tokens": "Prompt tokens that the engine took from the card instead of computing them",
    "loads": "Requests whose prompt was loaded from the card",
    "loads_failed": "Requests whose load failed and that were computed instead",
    "load_bytes": "Bytes loaded, all ranks",
    "chunks_loaded": "Objects loaded, all ranks",
    "chunks_planned": "Objects that the scheduler asked to store",
    "chunks_stored": "Objects stored, all ranks",
    "chunks_held": "Objects that were held already, all ranks",
    "chunks_refused": "Objects that the gateway did not take (quota, space, card), all ranks",
    "chunks_shed": "Objects not stored because too much was waiting",
    "stores_put_off": "Times that storing was put off because too much was waiting",
    "stores_failed": "Store jobs without an answer in time",
    "store_bytes": "Bytes stored, all ranks",
}
TIMINGS: Final[dict[str, str]] = {
    "lookup_seconds": "Seconds that a request's lookup held up the scheduler",
    "load_seconds": "Seconds from the order to load to the last byte in the cache",
    "store_seconds": "Seconds from the order to store to the gateway's answer",
}
BUCKETS: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SAMPLES_MAX: Final = 256
"""Times that are kept between two reports; further ones are not shown."""


class Stats:
    """Counts since the last `take`. Each side has its own, and each thread of a worker adds under the worker's lock."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._times: dict[str, list[float]] = {}

    def add(self, name: str, amount: int = 1) -> None:
        """Count."""
        assert name in COUNTERS
        self._counts[name] = self._counts.get(name, 0) + amount

    def time(self, name: str, seconds: float) -> None:
        """Note how long something took."""
        assert name in TIMINGS
        samples = self._times.setdefault(name, [])
        if len(samples) < SAMPLES_MAX:
            samples.append(seconds)

    def take(self) -> dict[str, Any] | None:
        """Return what was counted, as plain data, and begin anew; None: nothing."""
        if not self._counts and not self._times:
            return None
        data: dict[str, Any] = {**self._counts, **self._times}
        self._counts, self._times = {}, {}
        return data


def merge(data: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Add one side's counts to another's."""
    for name, value in other.items():
        if isinstance(value, list):
            data[name] = [*data.get(name, []), *value][-SAMPLES_MAX * 16 :]
        else:
            data[name] = data.get(name, 0) + value
    return data


def summary(data: dict[str, Any]) -> dict[str, int | float]:
    """Reduce counts to what one log line can show."""
    shown: dict[str, int | float] = {}
    for name, value in sorted(data.items()):
        if isinstance(value, list):
            if value:
                shown[f"{name}_max"] = round(max(value), 4)
        else:
            shown[name] = value
    return shown
