"""`xkv-gateway card`: what is done to a card while no gateway serves it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import uuid
from typing import TYPE_CHECKING, Any

import click
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from xkv_gateway.card.format_errors import GeometryChanged
from xkv_gateway.card.opening import FormatWish
from xkv_gateway.cardurl import SoftCardUrl, parse_card_url
from xkv_gateway.cli.card_text import facts_of, owner_of, rows_of, sentence
from xkv_gateway.cli.options import config_option, state_dir_of
from xkv_gateway.clock import entropy, monotonic_ns, wall_ns
from xkv_gateway.config import load_config
from xkv_gateway.daemon import offline
from xkv_gateway.daemon.offline import Door
from xkv_gateway.errors import CardUnavailableError, ConfigError, ExitCode, RefusedError
from xkv_gateway.sizes import format_size
from xkv_gateway.state import HostIdentity, configured_identity, make_state_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from click.decorators import FC

    from xkv_gateway.card.fsck import Report
    from xkv_gateway.cardurl import CardUrl
    from xkv_gateway.config import Config
    from xkv_gateway.config.tree import KeyPath

LABEL_BYTES_MAX = 64


@click.group()
def card() -> None:
    """Look at a card, check it, format it, adopt it: while no gateway serves it."""


def _reach_options(command: FC) -> FC:
    """Add what every command needs to reach a card."""
    state_dir = click.option(
        "--state-dir",
        metavar="DIR",
        help="Directory of what is kept between runs (this host's NVMe identity).",
    )
    return click.argument("url")(state_dir(config_option()(command)))


def _door(
    url: str,
    state_dir: str | None,
    file: Path | None,
    *,
    looks: bool,
    flags: dict[KeyPath, tuple[str, object]] | None = None,
) -> Door:
    """Return how the card is reached. With `looks` nothing is made: no state directory, no file."""
    given = dict(flags or {})
    if state_dir is not None:
        given["state_dir",] = ("--state-dir", state_dir)
    loaded = load_config(file=file, environment=os.environ, flags=given)
    try:
        parsed = parse_card_url(url)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _require_file(parsed, may_be_made=not looks)
    nvme = loaded.config.nvme
    if looks and isinstance(parsed, SoftCardUrl):
        # Its process lets every host in, so that no identity has to be kept for it.
        host_id = uuid.UUID(bytes=entropy(16), version=4)
        identity = HostIdentity(f"nqn.2014-08.org.nvmexpress:uuid:{host_id}", host_id)
    else:
        directory = state_dir_of(loaded)
        make_state_dir(directory)
        identity = configured_identity(nvme.host_nqn, nvme.host_id, directory, entropy)
    return Door(parsed, loaded.config, identity, monotonic_ns, wall_ns, entropy, _say)


def _require_file(url: CardUrl, *, may_be_made: bool) -> None:
    if not isinstance(url, SoftCardUrl) or url.path.exists() or (may_be_made and url.size_bytes is not None):
        return
    advice = "Write its size to have it made: soft:PATH?size=16GiB." if may_be_made else ""
    raise CardUnavailableError(f"{url.path} does not exist", advice=advice)


def _say(text: str) -> None:
    click.echo(text, err=True)


@card.command("format")
@_reach_options
@click.option("--au", metavar="SIZE", help="Allocation unit. Default: card.au (64KiB).")
@click.option("--objects", metavar="N", help="How many objects it has room for. Default: card.max_objects.")
@click.option("--label", default="", help="A name for people, up to 64 bytes.")
@click.option("--force", is_flag=True, help="Give up what is on the card.")
@click.option(
    "--takeover", is_flag=True, help="With --force: also from a gateway that has the card and lives."
)
def format_(
    url: str,
    state_dir: str | None,
    file: Path | None,
    au: str | None,
    objects: str | None,
    label: str,
    force: bool,
    takeover: bool,
) -> None:
    """Format the card at URL for the gateway: it is empty afterwards.

    A card that bears anything is refused without --force, and what it bears is said. One that a living gateway has is refused
    unless --takeover is given as well: then that gateway stops first.
    """
    if len(label.encode()) > LABEL_BYTES_MAX or "\0" in label:
        raise ConfigError(f"--label: at most {LABEL_BYTES_MAX} bytes, without NUL")
    if takeover and not force:
        raise ConfigError("--takeover: a format of somebody's card needs --force as well")
    flags: dict[KeyPath, tuple[str, object]] = {}
    if au is not None:
        flags["card", "au"] = ("--au", au)
    if objects is not None:
        flags["card", "max_objects"] = ("--objects", objects)
    door = _door(url, state_dir, file, looks=False, flags=flags)
    settings: Config = door.config
    wish = FormatWish(settings.card.au, settings.card.max_objects, label)
    superblock = uvloop.run(
        offline.format_card(door, wish, force=force, takeover=takeover, describe=sentence)
    )
    layout = superblock.layout
    room = format_size(layout.capacity_au * layout.au_bytes)
    click.echo(
        f"formatted {door.url}: card {uuid.UUID(bytes=superblock.stamp.card_uuid)}, room for {room} "
        f"in {layout.max_objects} objects at most"
    )


@card.command()
@_reach_options
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def info(url: str, state_dir: str | None, file: Path | None, as_json: bool) -> None:
    """Show what is on the card at URL, and whose it is. Nothing is written."""
    door = _door(url, state_dir, file, looks=True)
    seen = uvloop.run(offline.look_at(door))
    facts = facts_of(str(door.url), seen)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        _print_rows(str(door.url), rows_of(facts, seen))


@card.command()
@_reach_options
@click.option("--payload", is_flag=True, help="Read every object, and compare its checksum.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def check(url: str, state_dir: str | None, file: Path | None, payload: bool, as_json: bool) -> ExitCode:
    """Check the card at URL while no gateway serves it. Nothing is written.

    Exit code 0: nothing is wrong; 1: there are findings; 6: it cannot be read, or a gateway has it.
    """
    door = _door(url, state_dir, file, looks=True)
    with _progress() as progress:
        sight, report = uvloop.run(offline.check(door, payload=payload, progress=progress))
    superblock = sight.superblock
    if as_json:
        name = None if superblock is None else str(uuid.UUID(bytes=superblock.stamp.card_uuid))
        answer = {"url": str(door.url), "kind": sight.kind.value, "card_uuid": name, **report.to_json()}
        click.echo(json.dumps(answer, indent=2))
    else:
        _print_report(str(door.url), report)
    return ExitCode.OK if report.clean else ExitCode.DEGRADED


@card.command()
@_reach_options
@click.option("--yes", is_flag=True, help="Do not ask.")
def adopt(url: str, state_dir: str | None, file: Path | None, yes: bool) -> None:
    """Take over the card at URL from another host, or one that was copied to another namespace, as it is.

    Says whose it was, and asks. What it holds stays; where its namespace has become smaller, what is left of it.
    """
    door = _door(url, state_dir, file, looks=False)
    _require_file(door.url, may_be_made=False)
    seen = uvloop.run(offline.look_at(door))
    if not offline.adoptable(door, seen):
        click.echo(f"{door.url} needs no adoption: {sentence(seen)}")
        return
    superblock = seen.sight.superblock
    assert superblock is not None
    click.echo(f"{door.url}: {sentence(seen)}; its owner was {owner_of(superblock)}")
    if isinstance(seen.sight.error, GeometryChanged):
        click.echo(f"Its namespace has become smaller ({seen.sight.error}): what was beyond its end is lost.")
    elif seen.sight.error is not None:
        click.echo(f"It was formatted on another namespace ({seen.sight.error}). Never use both as one card.")
    if not yes and not sys.stdin.isatty():
        raise RefusedError("not adopted: nobody can be asked here", advice="--yes answers for scripts.")
    if not yes and not click.confirm("Adopt it?"):
        raise RefusedError("not adopted: nothing was changed")
    ours = uvloop.run(offline.adopt(door, superblock))
    click.echo(f"adopted {door.url}: it belongs to {owner_of(ours)} now")


# --- output ------------------------------------------------------------------------------------------------


def _print_rows(title: str, rows: list[tuple[str, str]]) -> None:
    click.echo(title)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(min_width=12, no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    Console(highlight=False, markup=False).print(table)


def _print_report(url: str, report: Report) -> None:
    rows = [(name.replace("_", " "), str(count)) for name, count in report.counts.items()]
    _print_rows(url, rows or [("nothing", "could be looked at")])
    for title, entries in (("note", report.notes), ("FINDING", report.findings)):
        for entry in entries:
            click.echo(f"{title} {entry.code}: {entry.where}: {entry.detail}")
    if report.omitted:
        click.echo(f"... and {report.omitted} more findings")
    number = len(report.findings) + report.omitted
    click.echo("clean: nothing is wrong" if report.clean else f"{number} findings")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar for each thing that is looked at, where standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _what, _done, _total: None
        return
    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield show
