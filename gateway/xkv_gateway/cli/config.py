"""`xkv-gateway config`: the sample file and the effective settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

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
    """Print every setting in effect, and where it came from ("-": not set)."""
    rows = [("setting", "value", "from"), *effective_values(load_settings(file, flags))]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for key, value, source in rows:
        click.echo(f"{key:{widths[0]}}  {value or '-':{widths[1]}}  {source}")
