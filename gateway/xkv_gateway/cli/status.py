"""`xkv-gateway status`: asks the admin port, shows tables or JSON."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console
from rich.table import Table

from xkv_gateway.binds import host_port
from xkv_gateway.cli.options import config_option, load_settings
from xkv_gateway.errors import ConfigError, ExitCode, GatewayUnreachableError, NotServingError
from xkv_gateway.service.tokens import read_token
from xkv_gateway.sizes import format_size
from xkv_process.text import ascii_only

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xkv_gateway.config import AdminConfig

NO_CARD_YET: Final = "card_offline"
TIMEOUT_S: Final = 3.0
ANSWER_BYTES_MAX: Final = 4 << 20
WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - what was bound, not what is bound


@click.command()
@click.option("--admin", metavar="HOST:PORT", help="Admin port of the gateway. Default: as configured.")
@config_option()
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Token of the admin port. Default: as configured.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the gateway's answer as JSON.")
def status(admin: str | None, file: Path | None, token_file: Path | None, *, as_json: bool) -> ExitCode:
    """Show what a running gateway does.

    Exit code 0: serving; 1: it answers, but the card is offline or recovering, or it is
    being stopped; 3: no gateway answers.
    """
    settings = load_settings(file, {}).config.admin
    if admin is None:
        host, port = WILDCARDS.get(settings.bind_address, settings.bind_address), settings.port
    else:
        host, port = split_admin(admin)
    answer = fetch_status(host, port, _token(settings, token_file))
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    else:
        _print(answer)
    healthy = answer["state"] == "serving" and answer["card"]["state"] == "online"
    return ExitCode.OK if healthy else ExitCode.DEGRADED


def split_admin(admin: str) -> tuple[str, int]:
    """Return host and port of `--admin`. Raises ConfigError."""
    host, colon, port = admin.removeprefix("http://").rstrip("/").rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--admin {admin!r}: write HOST:PORT, such as 127.0.0.1:5558")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _token(settings: AdminConfig, file: Path | None) -> str | None:
    """Return the token to show, from its file: never from the command line, where others see it."""
    named = file or settings.read_token_file or settings.token_file
    return None if named is None else read_token(Path(named), "--token-file", private=True)


def fetch_status(host: str, port: int, token: str | None = None) -> dict[str, Any]:
    """Return the answer of `GET /v1/status`.

    Raises:
        ConfigError: the gateway asks for another token.
        GatewayUnreachableError: nobody answers there, or somebody else does.
        NotServingError: it waits for its card.
    """
    where = host_port(host, port)
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        connection.request("GET", "/v1/status", headers=headers)
        response = connection.getresponse()
        body = response.read(ANSWER_BYTES_MAX)
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise GatewayUnreachableError(
            f"no gateway answers at {where}: {reason}",
            advice="Start one with `xkv-gateway serve`, or name its admin port with --admin HOST:PORT.",
        ) from None
    except http.client.HTTPException:
        # What it said is not repeated: it is anything, also for the terminal.
        raise _somebody_else(where, "no HTTP") from None
    finally:
        connection.close()
    if response.status == http.client.UNAUTHORIZED:
        raise ConfigError(
            f"the gateway at {where} asks for a token" + (", and this is not it" if token else ""),
            advice="Name the file of one with --token-file, or in the settings (admin.read_token_file).",
        )
    try:
        answer = json.loads(body)
        if response.status == http.client.SERVICE_UNAVAILABLE and answer["error"]["code"] == NO_CARD_YET:
            # A reason may hold what a target has said.
            raise NotServingError(ascii_only(f"{where}: {answer['error']['message']}"))
        complete = response.status == http.client.OK and {"version", "card", "usage"} <= answer.keys()
    except (ValueError, AttributeError, LookupError, TypeError, RecursionError):
        complete = False
    if not complete:
        raise _somebody_else(where, f"HTTP status {response.status}")
    return dict(answer)


def _somebody_else(where: str, what: str) -> GatewayUnreachableError:
    return GatewayUnreachableError(
        f"what answers at {where} is not a gateway's admin port ({what})",
        advice="Name the admin port with --admin HOST:PORT.",
    )


def _print(answer: dict[str, Any]) -> None:
    console = Console(highlight=False, markup=False)
    for title, rows in _sections(answer):
        table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
        table.add_column(min_width=16, no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(name, ascii_only(value or ""))
        console.print(table)
        console.print()


def _sections(answer: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    card, usage, addresses = answer["card"], answer["usage"], answer["addresses"]
    yield (
        f"Gateway {answer['version']}",
        [
            ("state", f"{answer['state']}, up {_duration(answer['uptime_s'])}, process {answer['pid']}"),
            ("control", addresses["control"]),
            ("regions", addresses["regions"]),
            ("state directory", answer["state_dir"]),
        ],
    )
    reason = f" ({card['reason']})" if card["reason"] else ""
    yield (
        "Card",
        [
            ("url", card["url"]),
            ("state", f"{card['state']}{reason}, for {_duration(card['state_age_s'])}"),
            ("size", f"{format_size(card['size_bytes'])} in blocks of {card['block_bytes']} B"),
            ("card", _card_name(card["run"])),
            ("start", _recovery(card["recovery"])),
            ("journal", _journal(card["journal"])),
            *(("damage", line) for line in card["recovery"]["damage"]),
            ("connection", _connection(card["connection"])),
        ],
    )
    target = answer.get("target")
    if target is not None:
        rows = [("at", target["rpc"]), ("state", f"{target['state']}: {target['reason']}")]
        yield "Target", rows
    capacity = max(usage["capacity_bytes"], 1)
    kinds = ("live", "free", "reserved", "doomed", "quarantined")
    yield (
        "Room",
        [
            *(
                (k, f"{format_size(usage[f'{k}_bytes'])} ({usage[f'{k}_bytes'] / capacity:.1%})")
                for k in kinds
            ),
            ("objects", f"{usage['objects']} of at most {usage['objects_max']}"),
            ("written", _written(answer["admission"])),
            ("leases", f"{usage['leases']} over {format_size(usage['leased_bytes'])}"),
            *(
                [("tickets", f"{usage['tickets']} over {format_size(usage['ticket_bytes'])}")]
                if usage["tickets"]
                else []
            ),
        ],
    )
    for title in ("cache", "requests", "errors", "device"):
        counters = answer[title].items()
        rows = [(name.replace("_", " "), _count(name, count)) for name, count in counters if count]
        yield title.capitalize(), rows or [("nothing yet", "")]


_RESERVED = {"held": ", reserved", "lost": ", not reserved", "unsupported": ""}
"""What is said of the reservation of a card that can be reserved."""


def _written(facts: dict[str, Any]) -> str:
    of = f" of {format_size(facts['bytes_per_day'])}" if facts["bytes_per_day"] else ""
    return f"{format_size(facts['written_bytes'])}{of} in 24 hours"


def _card_name(run: dict[str, Any]) -> str:
    label = f"{run['label']!r}, " if run["label"] else ""
    reserved = _RESERVED[run["reservation"]]
    return f"{label}{run['card_uuid']}, epoch {run['epoch']}, {run['phase']}{reserved}"


def _recovery(facts: dict[str, Any]) -> str:
    dropped = f"; {facts['dropped_objects']} given up because of damage" if facts["dropped_objects"] else ""
    return (
        f"{facts['objects']} objects in {facts['duration_s']:.2f} s: {facts['checkpoint_objects']} in the checkpoint,"
        f" then {facts['journal_batches']} journal batches ({format_size(facts['journal_bytes'])}){dropped}"
    )


def _journal(facts: dict[str, Any]) -> str:
    share = facts["used_bytes"] / max(facts["ring_bytes"], 1)
    return (
        f"{format_size(facts['used_bytes'])} of {format_size(facts['ring_bytes'])} ({share:.0%}),"
        f" {facts['checkpoints']} checkpoints in this run"
    )


def _connection(facts: dict[str, Any]) -> str:
    if not facts:
        return "none"
    if "controllers" in facts:
        return _through_linux(facts)
    digests = [name for name in ("header", "data") if facts[f"{name}_digest"]]
    paths = facts.get("paths", [])
    up = sum(path["connected"] for path in paths)
    return ", ".join(
        (
            *([f"{up} of {len(paths)} addresses connected"] if len(paths) > 1 else []),
            f"{facts['io_queues']} I/O queues of {facts['queue_entries']} entries",
            f"transfers up to {format_size(facts['max_transfer_bytes'])}",
            f"in-capsule data up to {format_size(facts['in_capsule_bytes'])}",
            f"digests: {' and '.join(digests) or 'none'}",
            _authenticated(facts["authenticated"]),
            f"keep-alive {facts['keep_alive_ms'] / 1000:g} s",
        )
    )


def _authenticated(facts: dict[str, Any] | None) -> str:
    if facts is None:
        return "not authenticated"
    ways = "both ways" if facts["both_ways"] else "this host only"
    return f"authenticated by DH-HMAC-CHAP ({facts['hash']}, {facts['group']}, {ways})"


def _through_linux(facts: dict[str, Any]) -> str:
    """Tell of a card that Linux has the connection to, or that somebody else attached."""
    controllers = ", ".join(facts["controllers"])
    whose = ""
    if "connected by us" in facts:
        whose = f", connected by {'this gateway' if facts['connected by us'] else 'somebody else'}"
    return (
        f"by Linux, /dev/{facts['node']}{f' through {controllers}' if controllers else ''}{whose},"
        f" commands end within {facts['io_timeout_ms'] / 1000:g} s, late ones within {facts['late_ms'] / 1000:g} s"
    )


def _count(name: str, count: int) -> str:
    return format_size(count) if name.endswith("_bytes") else str(count)


def _duration(seconds: float) -> str:
    minutes, rest_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [f"{value}{unit}" for value, unit in ((days, "d"), (hours, "h"), (minutes, "min")) if value]
    return " ".join([*parts, f"{rest_s}s"])
