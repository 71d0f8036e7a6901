"""Output of the operator's commands: tables for people, JSON for scripts."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from xkv_gateway.sizes import format_size
from xkv_process.text import ascii_only

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def print_json(document: Any) -> None:
    """Print a document."""
    click.echo(json.dumps(document, indent=2))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers_from: int = 1) -> None:
    """Print a table whose columns from `numbers_from` on are numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        table.add_column(
            name,
            justify="right" if index >= numbers_from else "left",
            overflow="fold",
            no_wrap=index >= numbers_from,
        )
    for row in rows:
        table.add_row(*(ascii_only(cell) for cell in row))
    Console(file=sys.stdout, highlight=False, markup=False).print(table)


def print_facts(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print names and values below a title."""
    click.echo(ascii_only(title))
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(min_width=12, no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, ascii_only(value))
    Console(file=sys.stdout, highlight=False, markup=False).print(table)


def size_or(size_bytes: int | None, otherwise: str) -> str:
    """Return a size, or what stands for none."""
    return otherwise if size_bytes is None else format_size(size_bytes)


def scope_text(scope: str) -> str:
    """Return the hexadecimal of a scope as a name."""
    return f"scope:{scope}" if scope else "_default"
