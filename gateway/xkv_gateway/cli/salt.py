"""`xkv-gateway salt`: salts and scopes."""

from __future__ import annotations

import json

import click

from xkv_gateway.cli.who import read_scope


@click.group()
def salt() -> None:
    """Salts of tenants: they are secrets, so they are read from standard input only."""


@salt.command()
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def tag(*, as_json: bool) -> None:
    """Read a salt from standard input and print its scope: what it is called everywhere else.

    The way back is not possible. An empty salt is the default scope, `_default`.
    """
    scope = read_scope().hex()
    click.echo(json.dumps({"scope": scope}) if as_json else scope or "_default")
