"""The outcome of a replay, for people (rich) and for programs (one JSON document)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rich.markup import escape
from rich.table import Table

from xkv_gateway.replay.stats import Operation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from xkv_gateway.replay.stats import LatencySummary, ReplayStats

MIB: Final = 1024 * 1024
TENANTS_SHOWN_MAX: Final = 50
"""In the table for people; the JSON document has all."""
SCOPE_DIGITS_SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """What the trace itself says, before anything is played."""

    name: str
    requests: int
    blocks: int
    distinct_blocks: int
    leading_repeats: int
    """Leading blocks seen earlier in the trace: the hits of a cold cache that has room for everything."""


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """Everything that a replay has to say when it ends."""

    trace: TraceFacts
    block_bytes: int
    namespace: str
    transfer: str
    """`region` or `inline`."""
    concurrency: int
    speed: float | None
    """Multiple of real time; None: as fast as possible."""
    stats: ReplayStats
    elapsed_ns: int
    problem: str | None
    """Why the replay ended early; None when it came to its end."""
    scopes: Sequence[bytes] = ()
    """Of the tenants that the trace was split over; empty: it was not."""

    def throughput_mib_s(self, transferred_bytes: int) -> float:
        """Bytes over the whole time of the replay."""
        return transferred_bytes / MIB / (self.elapsed_ns / 1e9) if self.elapsed_ns else 0.0


def as_document(outcome: ReplayOutcome) -> dict[str, Any]:
    """Build the JSON document of `--json`. Units stand last in the names."""
    stats = outcome.stats
    return {
        "trace": {
            "name": outcome.trace.name,
            "requests": outcome.trace.requests,
            "blocks": outcome.trace.blocks,
            "distinct_blocks": outcome.trace.distinct_blocks,
            "leading_repeats": outcome.trace.leading_repeats,
        },
        "block_bytes": outcome.block_bytes,
        "namespace": outcome.namespace,
        "transfer": outcome.transfer,
        "concurrency": outcome.concurrency,
        "speed": "max" if outcome.speed is None else outcome.speed,
        "complete": outcome.problem is None,
        "problem": outcome.problem,
        "requests": stats.requests,
        "blocks_asked": stats.blocks_asked,
        "hits": stats.blocks_hit,
        "hit_rate": stats.hit_rate,
        "blocks_loaded": stats.loads["ok"],
        "blocks_stored": stats.stores["stored"],
        "bytes_loaded": stats.bytes_loaded,
        "bytes_stored": stats.bytes_stored,
        "blocks_verified": stats.blocks_verified,
        "mismatches": stats.blocks_mismatched,
        "mismatch_examples": [
            {
                "request": mismatch.request_number,
                "hash_id": mismatch.hash_id,
                "first_difference": mismatch.first_difference,
            }
            for mismatch in stats.mismatch_examples
        ],
        "tenants": [_tenant_document(outcome, number) for number in range(len(outcome.scopes))],
        "loads": dict(sorted(stats.loads.items())),
        "stores": dict(sorted(stats.stores.items())),
        "leases_refused": stats.leases_refused,
        "leases_lost": stats.leases_lost,
        "busy_retries": stats.busy_retries,
        "elapsed_s": outcome.elapsed_ns / 1e9,
        "throughput_mib_s": {
            "load": outcome.throughput_mib_s(stats.bytes_loaded),
            "store": outcome.throughput_mib_s(stats.bytes_stored),
            "both": outcome.throughput_mib_s(stats.bytes_loaded + stats.bytes_stored),
        },
        "latency_us": {
            operation.value: _latency_document(stats.latencies[operation].summary())
            for operation in Operation
        },
    }


def _tenant_document(outcome: ReplayOutcome, number: int) -> dict[str, Any]:
    part = outcome.stats.of(number)
    return {
        "tenant": number,
        "scope": outcome.scopes[number].hex(),
        "requests": part.requests,
        "blocks_asked": part.blocks_asked,
        "hits": part.blocks_hit,
        "hit_rate": part.hit_rate,
        "stores": dict(sorted(part.stores.items())),
    }


def _latency_document(summary: LatencySummary | None) -> dict[str, float] | None:
    if summary is None:
        return None
    percentiles = {f"p{percent}": value / 1e3 for percent, value in summary.percentiles_ns.items()}
    return {"count": summary.count, **percentiles, "max": summary.max_ns / 1e3}


def print_report(outcome: ReplayOutcome, console: Console) -> None:
    """Print the tables for people."""
    console.print(_totals(outcome))
    console.print(_latencies(outcome.stats))
    if outcome.scopes:
        console.print(_tenants(outcome))
    for mismatch in outcome.stats.mismatch_examples:
        console.print(
            f"[bold red]mismatch[/]: request {mismatch.request_number}, block {mismatch.hash_id}: "
            f"differs from byte {mismatch.first_difference} on"
        )


def _totals(outcome: ReplayOutcome) -> Table:
    stats = outcome.stats
    rate = "-" if stats.hit_rate is None else f"{100 * stats.hit_rate:.2f} %"
    speed = "as fast as possible" if outcome.speed is None else f"{outcome.speed:g} x real time"
    table = Table(title=f"replay of {escape(outcome.trace.name)}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_row("requests", f"{stats.requests:,} of {outcome.trace.requests:,}, {speed}")
    table.add_row("blocks asked for", f"{stats.blocks_asked:,} of {_bytes(outcome.block_bytes)}")
    table.add_row("hits", f"{stats.blocks_hit:,} = {rate}")
    table.add_row("  cold cache, room for all", f"{outcome.trace.leading_repeats:,} hits in the whole trace")
    table.add_row("loaded", f"{stats.loads['ok']:,} blocks, {_bytes(stats.bytes_loaded)}")
    table.add_row("verified, byte for byte", f"{stats.blocks_verified:,} blocks")
    style = "bold red" if stats.blocks_mismatched else "green"
    table.add_row("mismatches", f"[{style}]{stats.blocks_mismatched:,}[/]")
    table.add_row("stored", f"{stats.stores['stored']:,} blocks, {_bytes(stats.bytes_stored)}")
    for name, counts, usual in (("loads", stats.loads, "ok"), ("stores", stats.stores, "stored")):
        for status, count in sorted(counts.items()):
            if status != usual:
                table.add_row(f"  {name}: {escape(status)}", f"{count:,} blocks")
    for name, count in (
        ("leases refused", stats.leases_refused),
        ("leases run out", stats.leases_lost),
        ("retries (gateway busy)", stats.busy_retries),
    ):
        if count:
            table.add_row(name, f"{count:,}")
    total_bytes = stats.bytes_loaded + stats.bytes_stored
    rates = [
        f"{outcome.throughput_mib_s(n):,.0f}" for n in (total_bytes, stats.bytes_loaded, stats.bytes_stored)
    ]
    table.add_row("time", f"{outcome.elapsed_ns / 1e9:.1f} s")
    table.add_row(
        "throughput", f"{rates[0]} MiB/s ({rates[1]} loaded, {rates[2]} stored), bytes by {outcome.transfer}"
    )
    return table


def _tenants(outcome: ReplayOutcome) -> Table:
    shown = min(len(outcome.scopes), TENANTS_SHOWN_MAX)
    more = f", the first {shown} of {len(outcome.scopes):,}" if shown < len(outcome.scopes) else ""
    table = Table(title=f"tenants{more}", title_justify="left")
    table.add_column("tenant")
    table.add_column("scope")
    for name in ("requests", "asked for", "hits", "hit rate", "stored", "over quota"):
        table.add_column(name, justify="right")
    for number in range(shown):
        part = outcome.stats.of(number)
        table.add_row(
            str(number),
            f"{outcome.scopes[number].hex()[:SCOPE_DIGITS_SHOWN]}...",
            f"{part.requests:,}",
            f"{part.blocks_asked:,}",
            f"{part.blocks_hit:,}",
            "-" if part.hit_rate is None else f"{100 * part.hit_rate:.2f} %",
            f"{part.stores['stored']:,}",
            f"{part.stores['over_quota']:,}",
        )
    return table


def _latencies(stats: ReplayStats) -> Table:
    table = Table(title="latency of each message, milliseconds", title_justify="left")
    table.add_column("operation")
    for name in ("messages", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    for operation in Operation:
        summary = stats.latencies[operation].summary()
        if summary is None:
            table.add_row(operation.value, "0", "-", "-", "-", "-")
            continue
        values = (*summary.percentiles_ns.values(), summary.max_ns)
        table.add_row(operation.value, f"{summary.count:,}", *(f"{value / 1e6:.3f}" for value in values))
    return table


def _bytes(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.1f} {unit}".replace(".0 ", " ")
        value /= 1024
    return f"{value:.1f} TiB"
