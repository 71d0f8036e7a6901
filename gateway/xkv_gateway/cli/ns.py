"""`xkv-gateway ns`: namespaces, and wiping them."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from xkv_gateway.cli.admin_client import AdminClient, admin_command, segment
from xkv_gateway.cli.tables import print_facts, print_json, print_table, scope_text
from xkv_gateway.cli.who import STANDARD_INPUT, find_scope, scope_option
from xkv_gateway.durations import format_duration, parse_duration
from xkv_gateway.errors import CardUnavailableError, ConfigError, RefusedError
from xkv_gateway.sizes import format_size

NONE: Final = "none"
POLL_S: Final = 0.2
ENDED: Final = ("done", "failed")


@click.group()
def ns() -> None:
    """Namespaces: see what they hold, how long, and wipe them. `_default` is the empty one."""


@ns.command("list")
@admin_command
def list_(*, client: AdminClient, as_json: bool) -> None:
    """Show all namespaces that hold something, or have a rule on how long."""
    entries = list(client.pages("/v1/namespaces", "namespaces"))
    if as_json:
        print_json(entries)
        return
    rows = [
        (
            entry["name"],
            f"{entry['objects']:,}",
            format_size(entry["charged_bytes"]),
            f"{entry['scopes']:,}",
            _lifetime(entry["ttl_idle_s"]),
            _lifetime(entry["ttl_total_s"]),
        )
        for entry in entries
    ]
    print_table(("namespace", "objects", "used", "scopes", "idle", "total"), rows)


@ns.command()
@click.argument("namespace")
@admin_command
def show(namespace: str, *, client: AdminClient, as_json: bool) -> None:
    """Show one namespace, and what each scope holds there."""
    path = f"/v1/namespaces/{segment(namespace)}"
    whole = client.get(f"{path}?count=1")
    scopes = list(client.pages(path, "scopes"))
    if as_json:
        print_json({**whole, "scopes": scopes, "next_cursor": None})
        return
    used = format_size(whole["charged_bytes"])
    rows = [
        ("objects", f"{whole['objects']:,}"),
        ("used", used),
        ("scopes", f"{whole['total']:,}"),
        ("ttl idle", _lifetime(whole["ttl_idle_s"])),
        ("ttl total", _lifetime(whole["ttl_total_s"])),
    ]
    print_facts(whole["name"], rows)
    print_table(
        ("scope", "tenant", "objects", "used", "leases"),
        [
            (
                scope_text(scope["scope"]),
                scope["tenant"] or "-",
                f"{scope['objects']:,}",
                format_size(scope["charged_bytes"]),
                f"{scope['leases']:,}",
            )
            for scope in scopes
        ],
        numbers_from=2,
    )


@ns.command("set")
@click.argument("namespace")
@click.option("--ttl-idle", metavar="TIME", help="Objects go when unused for so long (1h, 7d), or none.")
@click.option("--ttl-total", metavar="TIME", help="Objects go when stored so long ago, or none.")
@admin_command
def set_(
    namespace: str, ttl_idle: str | None, ttl_total: str | None, *, client: AdminClient, as_json: bool
) -> None:
    """Say how long objects of a namespace may live. What is not named stays as it is."""
    wishes = {
        "ttl_idle_s": _seconds(ttl_idle, "--ttl-idle"),
        "ttl_total_s": _seconds(ttl_total, "--ttl-total"),
    }
    body = {field: seconds for field, seconds in wishes.items() if seconds is not None}
    if not body:
        raise ConfigError("nothing to set: give --ttl-idle, --ttl-total, or both")
    document = client.ask("PUT", f"/v1/namespaces/{segment(namespace)}", json.dumps(body)).body
    if as_json:
        print_json(document)
        return
    rows = [(f"ttl {which}", _lifetime(document[f"ttl_{which}_s"])) for which in ("idle", "total")]
    print_facts(document["name"], rows)


def _seconds(text: str | None, option: str) -> int | None:
    if text is None:
        return None
    if text == NONE:
        return 0
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}, or {NONE}") from None
    if not seconds:
        raise ConfigError(f"{option}: a lifetime is longer than nothing; {NONE} takes the rule away")
    return seconds


def _lifetime(seconds: int) -> str:
    return format_duration(seconds) if seconds else "-"


@ns.command()
@click.argument("namespace")
@click.option(
    "--scope", metavar="HEX", help="Only this scope (HEX, _default, or - for a salt on standard input)."
)
@click.option("--tenant", metavar="NAME", help="Only the scope of this tenant.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@admin_command
def wipe(
    namespace: str,
    scope: str | None,
    tenant: str | None,
    *,
    client: AdminClient,
    yes: bool,
    as_json: bool,
) -> None:
    """Forget all that a namespace holds, or one scope in it, and erase its bytes from the card.

    It is invisible at once, and goes on after Ctrl-C here or a crash of the gateway. What is under a lease is erased when the
    lease ends. The bytes are read back: the report says so.
    """
    digits = _only(client, scope, tenant)
    what = f"all of {namespace}" if digits is None else f"{scope_text(digits)} in {namespace}"
    if not yes:
        _ask(client, namespace, what, only=digits is not None)
    query = "" if digits is None else f"&scope={digits or '_default'}"
    document = client.ask("DELETE", f"/v1/namespaces/{segment(namespace)}?wait_s=0{query}").body
    document = _follow(client, document)
    if as_json:
        print_json(document)
    else:
        _report(what, document)
    if document["stage"] != "done":
        raise CardUnavailableError(
            "the card went away before the wipe was done",
            advice="The next start on that card goes on with it.",
        )


@ns.command()
@admin_command
def wipes(*, client: AdminClient, as_json: bool) -> None:
    """Show the wipes that are under way, and the last ones that ended."""
    entries = client.get("/v1/wipes")["wipes"]
    if as_json:
        print_json(entries)
        return
    rows = [
        (
            str(entry["id"]),
            entry["namespace"],
            entry["scope"] or "all",
            entry["stage"],
            f"{entry['objects']:,}",
            format_size(entry["erased_bytes"]),
            format_size(entry["left_bytes"]),
            format_size(entry["waiting_bytes"]),
        )
        for entry in entries
    ]
    columns = ("wipe", "namespace", "scope", "stage", "objects", "erased", "left", "waiting")
    print_table(columns, rows, numbers_from=4)


def _only(client: AdminClient, scope: str | None, tenant: str | None) -> str | None:
    """Return the hexadecimal of the scope that is meant, None for all of them."""
    if scope is not None and tenant is not None:
        raise ConfigError("--scope and --tenant both name a scope: give one of them")
    if tenant is not None:
        return find_scope(client, tenant)
    if scope is None:
        return None
    return find_scope(client, scope) if scope == STANDARD_INPUT else scope_option(scope)


def _ask(client: AdminClient, namespace: str, what: str, *, only: bool) -> None:
    if not sys.stdin.isatty():
        raise RefusedError("not wiped: nobody can be asked here", advice="--yes answers for scripts.")
    held = ""
    if not only:
        found = client.get(f"/v1/namespaces/{segment(namespace)}?count=1")
        held = f" ({found['objects']:,} objects, {format_size(found['charged_bytes'])})"
    if not click.confirm(f"Wipe {what}{held}? It cannot be undone."):
        raise RefusedError("not wiped: nothing was changed")


def _follow(client: AdminClient, document: dict[str, Any]) -> dict[str, Any]:
    """Show the progress until the end; return the report."""
    shown = sys.stderr.isatty()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as bars:
        bar = bars.add_task("erasing", total=None)
        try:
            while document["stage"] not in ENDED:
                total = document["erased_bytes"] + document["left_bytes"]
                waiting = document["waiting_bytes"]
                text = (
                    f"waiting for leases: {format_size(waiting)}"
                    if waiting == document["left_bytes"]
                    else "erasing"
                )
                bars.update(bar, description=text, total=total or None, completed=document["erased_bytes"])
                time.sleep(POLL_S)
                document = client.get(f"/v1/wipes/{document['id']}")
        except KeyboardInterrupt:
            click.echo(f"wipe {document['id']} goes on; `xkv-gateway ns wipes` shows it", err=True)
            raise
    return document


def _report(what: str, document: dict[str, Any]) -> None:
    print_facts(
        f"wipe {document['id']} of {what}: {document['stage']}",
        [
            ("objects", f"{document['objects']:,} of {format_size(document['payload_bytes'])}"),
            ("erased", f"{format_size(document['erased_bytes'])} in whole units"),
            ("left", format_size(document["left_bytes"])),
            ("verified", document["verification"]),
            ("time", f"{document['elapsed_s']:.1f} s"),
        ],
    )
