"""`xkv-gateway config`: the sample file and the effective settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from xkv_gateway.cli.options import load_settings, setting_options
from xkv_gateway.config import sample_text
from xkv_gateway.config.sample import effective_values

if TYPE_CHECKING:
    from pathlib import Path


@click.group()
def config() -> None:
    """Settings: print a sample file, or what is in effect."""


@config.command()
def sample() -> None:
    """Print an annotated file that names every setting with its default."""
    click.echo(sample_text(), nl=False)


@config.command()
@setting_options
def show(file: Path | None, **flags: str | None) -> None:
    """Print every setting in effect, and where it came from."""
    table = Table("setting", "value", "from", box=None, pad_edge=False)
    for key, value, source in effective_values(load_settings(file, flags)):
        table.add_row(key, value or "(not set)", source)
    Console(highlight=False, markup=False, soft_wrap=True).print(table)
