"""`xkv-gateway quota`: what each tenant may hold, for the running gateway and on its card."""

from __future__ import annotations

from decimal import Decimal, localcontext
from typing import Any, Final

import click

from xkv_gateway.cli.admin_client import AdminClient, admin_command
from xkv_gateway.cli.tables import print_json, print_table, scope_text, size_or
from xkv_gateway.cli.who import find_scope, quota_path
from xkv_gateway.errors import ConfigError, RefusedError
from xkv_gateway.sizes import format_size, parse_size

EXACT_DIGITS: Final = 64
"""More than any int64 divided by 2^30 has."""


@click.group()
def quota() -> None:
    """Quotas: list, set and remove what tenants may hold.

    WHO is the name of a tenant, scope:HEX, _default, or - for a salt on standard input.
    """


@quota.command("list")
@admin_command
def list_(*, client: AdminClient, as_json: bool) -> None:
    """Show all quotas and how much of them is used."""
    entries = [
        tenant for tenant in client.pages("/v1/tenants", "tenants") if tenant["limit_bytes"] is not None
    ]
    if as_json:
        names = ("name", "scope", "limit_bytes", "charged_bytes")
        print_json([{name: tenant[name] for name in names} for tenant in entries])
        return
    rows = [
        (
            tenant["name"] or scope_text(tenant["scope"]),
            format_size(tenant["limit_bytes"]),
            format_size(tenant["charged_bytes"]),
            share_text(tenant["charged_bytes"], tenant["limit_bytes"]),
        )
        for tenant in entries
    ]
    print_table(("tenant", "limit", "used", ""), rows)


@quota.command("set")
@click.argument("who")
@click.argument("size")
@admin_command
def set_(who: str, size: str, *, client: AdminClient, as_json: bool) -> None:
    """Set the quota of WHO to SIZE (5GB, 5GiB, bytes; 0: it may store nothing)."""
    limit_bytes = size_argument(size)
    scope = find_scope(client, who)
    with localcontext(prec=EXACT_DIGITS):
        # The route's unit is 2^30 bytes; a decimal fraction tells every number of bytes exactly.
        limit_gb = f"{Decimal(limit_bytes) / (1 << 30):f}"
    client.ask("PUT", quota_path(scope), f'{{"limit_gb": {limit_gb}}}')
    _show(client.get(f"/v1/tenants/{scope_text(scope)}"), as_json=as_json)


@quota.command()
@click.argument("who")
@admin_command
def rm(who: str, *, client: AdminClient, as_json: bool) -> None:
    """Remove the quota of WHO. From then on the rule for scopes without a quota holds."""
    scope = find_scope(client, who)
    if client.ask("DELETE", quota_path(scope)).body["status"] != "removed":
        raise RefusedError("it has no quota")
    _show(client.get(f"/v1/tenants/{scope_text(scope)}"), as_json=as_json)


def size_argument(text: str) -> int:
    """Return the bytes of a size on the command line. Raises ConfigError."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def share_text(used_bytes: int, limit_bytes: int | None) -> str:
    """Return which part of a limit is used."""
    return f"{used_bytes / limit_bytes:.0%}" if limit_bytes else ""


def _show(tenant: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(tenant)
        return
    name = tenant["name"] or scope_text(tenant["scope"])
    limit = size_or(tenant["limit_bytes"], "no quota of its own")
    click.echo(f"{name}: {limit}, {format_size(tenant['charged_bytes'])} used")
