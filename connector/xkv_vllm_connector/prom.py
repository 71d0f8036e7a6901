"""The connector's counts as vLLM carries, logs and shows them. Uses vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from xkv_vllm_connector.metrics import BUCKETS, COUNTERS, TIMINGS, merge, summary

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PREFIX = "vllm:fusionx_"


class FusIOnXStats(KVConnectorStats):  # type: ignore[misc] # the engine's classes have no types here
    """Counts on their way."""

    def reset(self) -> None:
        """Begin anew."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another's counts."""
        merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Reduce to what a log line shows."""
        return summary(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class FusIOnXPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc] # as above
    """What is shown on `/metrics`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make_counter, make_histogram = metric_types[Counter], metric_types[Histogram]
        self._counters = {
            name: make_counter(name=PREFIX + name, documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        self._histograms = {
            name: make_histogram(
                name=PREFIX + name, documentation=text, labelnames=labelnames, buckets=list(BUCKETS)
            )
            for name, text in TIMINGS.items()
        }
        self._labels = per_engine_labelvalues

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take the counts of an interval."""
        labels = self._labels[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(value)
            elif name in self._histograms:
                for seconds in value:
                    self._histograms[name].labels(*labels).observe(seconds)
