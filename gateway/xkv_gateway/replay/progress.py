"""The progress bar: on standard error, and only where a person looks at it."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from xkv_gateway.replay.stats import ReplayStats
    from xkv_gateway.replay.trace import Trace


@contextmanager
def show_progress(trace: Trace) -> Iterator[Callable[[ReplayStats], None]]:
    """Show a bar while the block runs; yields what to call with the counts so far."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    columns = (
        TextColumn("replay"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests, hit rate {task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("replay", total=len(trace.requests), rate="-")

        def update(stats: ReplayStats) -> None:
            rate = "-" if stats.hit_rate is None else f"{100 * stats.hit_rate:.1f} %"
            progress.update(task, completed=stats.requests, rate=rate)

        yield update
