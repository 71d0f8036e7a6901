"""`xkv-gateway tenant`: names for scopes, with their quotas."""

from __future__ import annotations

import json
from typing import Any

import click

from xkv_gateway.cli.admin_client import AdminClient, admin_command, segment
from xkv_gateway.cli.quota import share_text, size_argument
from xkv_gateway.cli.tables import print_facts, print_json, print_table, scope_text, size_or
from xkv_gateway.cli.who import STANDARD_INPUT, find_scope, read_scope, scope_option
from xkv_gateway.errors import ConfigError
from xkv_gateway.sizes import format_size


@click.group()
def tenant() -> None:
    """Tenants: give scopes names and quotas, see what they hold.

    A tenant is a scope (`salt tag` makes one of a salt); what it holds is summed over all namespaces.
    """


@tenant.command("list")
@admin_command
def list_(*, client: AdminClient, as_json: bool) -> None:
    """Show all tenants that have a name or a quota, and what the others hold together."""
    head = client.get("/v1/tenants?count=1")
    entries = list(client.pages("/v1/tenants", "tenants"))
    if as_json:
        print_json({**head, "tenants": entries, "next_cursor": None})
        return
    rows = [
        (
            entry["name"] or scope_text(entry["scope"]),
            f"{entry['objects']:,}",
            format_size(entry["charged_bytes"]),
            size_or(entry["limit_bytes"], "-"),
            share_text(entry["charged_bytes"], entry["limit_bytes"]),
        )
        for entry in entries
    ]
    rest = (f"{head['unnamed_objects']:,}", format_size(head["unnamed_charged_bytes"]), "", "")
    print_table(("tenant", "objects", "used", "limit", ""), [*rows, ("(all without a name)", *rest)])
    if not head["complete"]:
        click.echo(
            "Damage took quotas away: set those that are missing, then say `xkv-gateway tenant confirm`."
        )


@tenant.command()
@click.argument("who")
@admin_command
def show(who: str, *, client: AdminClient, as_json: bool) -> None:
    """Show one tenant: its name, scope:HEX, _default, or - for a salt on standard input."""
    entry = client.get(f"/v1/tenants/{scope_text(find_scope(client, who))}")
    if as_json:
        print_json(entry)
    else:
        _print(entry)


@tenant.command("set")
@click.argument("name")
@click.option(
    "--scope",
    metavar="HEX",
    help="The scope to name, or - for a salt on standard input. Default: the one it has.",
)
@click.option("--limit", metavar="SIZE", help="Its quota: 5GB, 5GiB, bytes; 0: it may store nothing.")
@click.option("--no-limit", is_flag=True, help="A name without a quota.")
@admin_command
def set_(
    name: str,
    scope: str | None,
    limit: str | None,
    *,
    client: AdminClient,
    no_limit: bool,
    as_json: bool,
) -> None:
    """Give a scope the name NAME, and a quota."""
    if (limit is None) != no_limit:
        raise ConfigError("give its quota with --limit SIZE, or say --no-limit")
    wish: dict[str, Any] = {"no_limit": True} if limit is None else {"limit_bytes": size_argument(limit)}
    if scope is None:
        digits = find_scope(client, name)
    else:
        digits = read_scope().hex() if scope == STANDARD_INPUT else scope_option(scope)
    body = json.dumps({"scope": digits, **wish})
    entry = client.ask("PUT", f"/v1/tenants/{segment(name)}", body).body
    if as_json:
        print_json(entry)
    else:
        _print(entry)


@tenant.command()
@click.argument("name")
@admin_command
def rm(name: str, *, client: AdminClient, as_json: bool) -> None:
    """Take name and quota of NAME away. What it holds stays, under the rule for scopes without a quota."""
    answer = client.ask("DELETE", f"/v1/tenants/{segment(name)}").body
    if as_json:
        print_json(answer)
    else:
        click.echo(f"{name}: removed")


@tenant.command()
@admin_command
def confirm(*, client: AdminClient, as_json: bool) -> None:
    """Say that the quotas are complete, after damage on the card took some away."""
    answer = client.ask("POST", "/v1/tenants:confirm").body
    if as_json:
        print_json(answer)
    else:
        click.echo("confirmed: scopes without a quota are without one")


def _print(entry: dict[str, Any]) -> None:
    share = share_text(entry["charged_bytes"], entry["limit_bytes"])
    effective = entry["effective_limit_bytes"]
    rows = [
        ("scope", scope_text(entry["scope"])),
        ("limit", size_or(entry["limit_bytes"], "no quota of its own")),
        ("holds now", f"at most {format_size(effective)}" if effective is not None else "no limit"),
        ("used", f"{format_size(entry['charged_bytes'])}{f' ({share})' if share else ''}"),
        ("objects", f"{entry['objects']:,}"),
        ("leases", f"{entry['leases']:,} over {format_size(entry['leased_bytes'])}"),
    ]
    for name, count in (entry["counters"] or {}).items():
        text = format_size(count) if name.endswith("_bytes") else f"{count:,}"
        rows.append((name.replace("_", " "), text))
    print_facts(entry["name"] or "no name", rows)
