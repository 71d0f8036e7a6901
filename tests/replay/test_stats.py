from __future__ import annotations

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from xkv_gateway.replay.report import ReplayOutcome, TraceFacts, as_document, print_report
from xkv_gateway.replay.stats import (
    MAX_EXAMPLES,
    Latencies,
    Mismatch,
    Operation,
    ReplayStats,
    nearest_rank,
)

FACTS = TraceFacts("some [trace].jsonl", requests=10, blocks=100, distinct_blocks=60, leading_repeats=40)


def outcome(
    stats: ReplayStats, *, elapsed_ns: int = 2_000_000_000, problem: str | None = None
) -> ReplayOutcome:
    return ReplayOutcome(FACTS, 65536, "replay", "region", 1, None, stats, elapsed_ns, problem)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=300), st.integers(1, 100))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(
    values: list[int], percent: int
) -> None:
    value = nearest_rank(sorted(values), percent)
    assert value in values
    assert sum(v <= value for v in values) * 100 >= percent * len(values)
    assert sum(v < value for v in values) * 100 < percent * len(values)


def test_latencies_sum_up_and_none_is_not_zero() -> None:
    latencies = Latencies()
    assert latencies.summary() is None
    for value in range(1, 201):
        latencies.add(value)
    summary = latencies.summary()
    assert summary is not None
    assert (summary.count, summary.percentiles_ns, summary.max_ns) == (200, {50: 100, 90: 180, 99: 198}, 200)


def test_only_the_first_mismatches_are_kept_and_all_are_counted() -> None:
    stats = ReplayStats()
    for number in range(20):
        stats.add_mismatch(Mismatch(number, number, 0))
    assert stats.blocks_mismatched == 20
    assert len(stats.mismatch_examples) == MAX_EXAMPLES


def test_the_document_is_json_and_agrees_with_the_counts() -> None:
    stats = ReplayStats(
        requests=10, blocks_asked=100, blocks_hit=40, blocks_verified=39, bytes_loaded=2 * 2**20
    )
    stats.loads.update({"ok": 40})
    stats.stores.update({"stored": 55, "exists": 5})
    stats.bytes_stored = 4 * 2**20
    stats.latencies[Operation.LOOKUP].add(1500)
    stats.add_mismatch(Mismatch(3, 17, 512))
    document = json.loads(json.dumps(as_document(outcome(stats)), allow_nan=False))
    assert document["hit_rate"] == 0.4
    assert document["blocks_loaded"] == 40
    assert document["stores"] == {"exists": 5, "stored": 55}
    assert document["throughput_mib_s"] == {"load": 1.0, "store": 2.0, "both": 3.0}
    assert document["latency_us"]["lookup"] == {"count": 1, "p50": 1.5, "p90": 1.5, "p99": 1.5, "max": 1.5}
    assert document["latency_us"]["load"] is None
    assert document["mismatch_examples"] == [{"request": 3, "hash_id": 17, "first_difference": 512}]
    assert document["complete"] is True


def test_nothing_played_gives_no_rate_and_no_division_by_zero() -> None:
    document = as_document(outcome(ReplayStats(), elapsed_ns=0, problem="no gateway"))
    assert document["hit_rate"] is None
    assert document["throughput_mib_s"]["both"] == 0.0
    assert (document["complete"], document["problem"]) == (False, "no gateway")


@pytest.mark.parametrize("mismatches", [0, 1])
def test_the_report_for_people_says_the_figures(mismatches: int) -> None:
    stats = ReplayStats(requests=10, blocks_asked=100, blocks_hit=40, busy_retries=3)
    stats.stores.update({"stored": 55, "no_space": 5})
    for number in range(mismatches):
        stats.add_mismatch(Mismatch(number + 1, 17, 512))
    text = io.StringIO()
    print_report(outcome(stats), Console(file=text, width=100))
    shown = text.getvalue()
    for part in (
        "some [trace].jsonl",
        "40 = 40.00 %",
        "stores: no_space",
        "5 blocks",
        "gateway busy",
        "lookup",
    ):
        assert part in shown
    assert ("request 1, block 17: differs from byte 512 on" in shown) is bool(mismatches)
