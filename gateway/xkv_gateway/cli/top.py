"""`xkv-gateway top`: a live screen of one gateway and its tenants."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from xkv_gateway.cli.admin_client import AdminClient, admin_command
from xkv_gateway.cli.quota import share_text
from xkv_gateway.cli.tables import print_json, size_or
from xkv_gateway.cli.top_sample import Look, View, view
from xkv_gateway.clock import monotonic_ns
from xkv_gateway.errors import ExitCode
from xkv_gateway.sizes import format_size
from xkv_process.text import ascii_only

if TYPE_CHECKING:
    from rich.console import RenderableType

LINES_MIN: Final = 5
HEAD_LINES: Final = 9
WIDE: Final = 120
"""Columns from which on everything has room."""
COLUMNS_MAX: Final = 160
NAME_WIDTH_MIN: Final = 8


@click.command()
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 60),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--once", is_flag=True, help="Print one screen, of one interval, and end.")
@admin_command
def top(interval: float, *, client: AdminClient, once: bool, as_json: bool) -> ExitCode:
    """Show what a gateway does now: rates, hit rate, bytes and evictions of each tenant, the card and its queues.

    Tenants without a name have no counters of their own. With --json, one interval is printed as JSON. Ctrl-C ends it. Where the
    output is no terminal, it is as with --once.
    """
    before = _look(client)
    if once or as_json or not sys.stdout.isatty():
        time.sleep(interval)
        seen = view(before, _look(client))
        if as_json:
            print_json(seen.to_json())
        else:
            console = Console(file=sys.stdout, highlight=False)
            # What is not a terminal has no width of its own.
            console.width = console.width if console.is_terminal else max(console.width, WIDE)
            console.print(render(seen, client.where, None, columns=console.width))
        return ExitCode.OK if seen.card == "online" else ExitCode.DEGRADED
    console = Console(highlight=False)
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                now = _look(client)
                room = max(LINES_MIN, console.size.height - HEAD_LINES)
                shown = render(view(before, now), client.where, room, columns=console.width)
                live.update(shown, refresh=True)
                before = now
        except KeyboardInterrupt:
            return ExitCode.OK


def _look(client: AdminClient) -> Look:
    status = client.get("/v1/status")
    head = client.get("/v1/tenants?count=1")
    tenants = list(client.pages("/v1/tenants", "tenants"))
    return Look(monotonic_ns(), status, tenants, head["unnamed_objects"], head["unnamed_charged_bytes"])


def render(seen: View, where: str, lines_max: int | None, *, columns: int) -> RenderableType:
    """Return the screen; at most `lines_max` tenants, those that hold most. Below WIDE columns: without limits and objects."""
    wide = columns >= WIDE
    style = "green" if seen.card == "online" else "bold red"
    reason = f" ({ascii_only(seen.reason)})" if seen.reason and seen.card != "online" else ""
    queues = ", ".join(f"{count} {name}" for name, count in seen.queues.items())
    head = Text.assemble(
        (f"xkv-gateway at {where}", "bold"),
        f", {seen.state}, card ",
        (seen.card + reason, style),
        f", {seen.used_share:.1%} used, {seen.leases} leases\n",
        f"hit rate {_percent(seen.hit_rate)}   read {_rate(seen.read_bytes)}   written {_rate(seen.write_bytes)}",
        f"   evicted {seen.evicted:,.0f}/s   errors {seen.errors:,.1f}/s\n",
        f"requests/s: {', '.join(f'{name} {rate:,.0f}' for name, rate in seen.requests.items() if rate) or 'none'}\n",
        f"in flight: {queues or 'nothing'}   journal {seen.journal_share:.0%}\n",
    )
    # What is short of room are names, never numbers.
    table = Table(box=None, pad_edge=False, header_style="bold", width=min(columns, COLUMNS_MAX))
    table.add_column("tenant", overflow="ellipsis", no_wrap=True, ratio=1, min_width=NAME_WIDTH_MIN)
    extra = ("limit", "objects") if wide else ()
    for name in ("used", "", *extra, "keys/s", "hits", "stored", "evict/s", "refuse/s"):
        table.add_column(name, justify="right", no_wrap=True)
    shown = seen.tenants if lines_max is None else seen.tenants[:lines_max]
    for line in shown:
        table.add_row(
            Text(ascii_only(line.name)),
            format_size(line.charged_bytes),
            share_text(line.charged_bytes, line.limit_bytes),
            *((size_or(line.limit_bytes, "-"), f"{line.objects:,}") if wide else ()),
            _number(line.lookup_keys),
            _percent(line.hit_rate),
            "-" if line.stored_bytes is None else _rate(line.stored_bytes),
            _number(line.evicted),
            _number(line.over_quota),
        )
    hidden = len(seen.tenants) - len(shown)
    return Group(head, table, Text(f"... and {hidden} more") if hidden else Text(""))


def _rate(bytes_a_second: float) -> str:
    return f"{format_size(int(bytes_a_second))}/s"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
