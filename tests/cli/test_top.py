"""What `top` shows in the columns that there are."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from xkv_gateway.cli.top import render
from xkv_gateway.cli.top_sample import TenantLine, View

LONG = "a-tenant-with-a-name-that-is-as-long-as-they-may-be"


def screen(columns: int) -> str:
    tenants = [
        TenantLine(
            LONG, 1_234_567_890_123, 9_876_543_210_987, 1_234_567, 123_456.0, 0.9876, 1.2e8, 1234.0, 56.0
        ),
        TenantLine("scope:0102", 0, None, 0, None, None, None, None, None),
    ]
    requests, queues = {"load": 12_345.0}, {"requests": 1}
    seen = View(1.0, "serving", "online", "", 0.5, requests, 0.5, 1e9, 1e9, 3.0, 0.0, queues, 0.1, 3, tenants)
    console = Console(file=io.StringIO(), width=columns, highlight=False)
    console.print(render(seen, "127.0.0.1:5558", None, columns=columns))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("columns", [80, 100, 120, 160, 300])
def test_names_are_cut_where_room_is_short_and_numbers_never(columns: int) -> None:
    text = screen(columns)
    lines = text.splitlines()
    assert max(map(len, lines)) <= columns
    cells = ("1.12 TiB", "12%", "123,456", "98.8%", "114.44 MiB/s", "1,234", "56")
    more = ("8.98 TiB", "1,234,567") if columns >= 120 else ()
    row = next(line for line in lines if line.startswith(LONG[:8]))
    assert all(cell in row for cell in (*cells, *more)), text
    head = next(line for line in lines if line.startswith("tenant"))
    assert head.split() == [
        *("tenant", "used"),
        *(("limit", "objects") if more else ()),
        *("keys/s", "hits", "stored", "evict/s", "refuse/s"),
    ]


def test_a_very_narrow_screen_still_tells_tenants_apart() -> None:
    assert f"\n{LONG[:7]}…" in screen(60)
    assert f"\n{LONG} " in screen(160)
