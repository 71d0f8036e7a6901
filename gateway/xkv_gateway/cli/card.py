"""`xkv-gateway card`: what is done to a card while no gateway serves it."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import click
import uvloop

from xkv_gateway.card.opening import FormatWish
from xkv_gateway.cardurl import SoftCardUrl, parse_card_url
from xkv_gateway.cli.options import config_option, load_settings, state_dir_of
from xkv_gateway.clock import entropy, monotonic_ns, wall_ns
from xkv_gateway.daemon.formatting import format_card
from xkv_gateway.errors import CardUnavailableError, ConfigError
from xkv_gateway.sizes import format_size
from xkv_gateway.state import configured_identity, make_state_dir

if TYPE_CHECKING:
    from pathlib import Path

LABEL_BYTES_MAX = 64


@click.group()
def card() -> None:
    """Cards: prepare one for its first use."""


@card.command("format")
@click.argument("url")
@click.option("--force", is_flag=True, help="Give up what is on the card.")
@click.option("--label", default="", help="A name for people, up to 64 bytes.")
@click.option(
    "--state-dir", metavar="DIR", help="Directory of what is kept between runs (this host's NVMe identity)."
)
@config_option()
def format_(url: str, force: bool, label: str, state_dir: str | None, file: Path | None) -> None:
    """Format the card at URL for the gateway: it is empty afterwards.

    The sizes follow from card.au and card.max_objects. A card that is not blank is refused without --force, and one that a
    living gateway has is refused always.
    """
    loaded = load_settings(file, {"state_dir": state_dir})
    settings = loaded.config
    if len(label.encode()) > LABEL_BYTES_MAX:
        raise ConfigError(f"--label: more than {LABEL_BYTES_MAX} bytes")
    try:
        parsed = parse_card_url(url)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if isinstance(parsed, SoftCardUrl) and parsed.size_bytes is None and not parsed.path.exists():
        raise CardUnavailableError(
            f"{parsed.path} does not exist", advice="Write its size: soft:PATH?size=16GiB."
        )
    directory = state_dir_of(loaded)
    make_state_dir(directory)
    superblock = uvloop.run(
        format_card(
            parsed,
            FormatWish(settings.card.au, settings.card.max_objects, label),
            settings.nvme,
            configured_identity(settings.nvme.host_nqn, settings.nvme.host_id, directory, entropy),
            force=force,
            clock=monotonic_ns,
            wall_clock=wall_ns,
            entropy=entropy,
        )
    )
    layout = superblock.layout
    room = format_size(layout.capacity_au * layout.au_bytes)
    click.echo(
        f"formatted {parsed}: card {uuid.UUID(bytes=superblock.stamp.card_uuid)}, room for {room} "
        f"in {layout.max_objects} objects at most"
    )
