"""`xkv-gateway serve`: the daemon, in the foreground."""

from __future__ import annotations

import contextlib
import gc
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import uvloop

from xkv_gateway.cli.options import load_settings, setting_options, state_dir_of
from xkv_gateway.clock import entropy, monotonic_ns, wall_ns
from xkv_gateway.daemon import build
from xkv_gateway.errors import ConfigError
from xkv_gateway.logs import set_up_logging
from xkv_gateway.sizes import format_size
from xkv_process.open_files import allow_open_files

if TYPE_CHECKING:
    from xkv_gateway.config import AdminConfig, Config
    from xkv_gateway.errors import ExitCode
    from xkv_gateway.service.status import Status


@click.command()
@setting_options
@click.option("--takeover", is_flag=True, help="Take the card from another gateway that lives.")
def serve(file: Path | None, takeover: bool, **flags: str | None) -> ExitCode:
    """Serve a card, in the foreground, until Ctrl-C or SIGTERM.

    Without --card: a soft card (a file) in the state directory, for development and small set-ups.
    """

    def load() -> Config:
        loaded = load_settings(file, flags)
        return loaded.config.model_copy(update={"state_dir": str(state_dir_of(loaded))})

    config = load()
    allow_open_files(ConfigError)
    set_up_logging(config.log.level, config.log.format, clock=monotonic_ns, environment=os.environ)
    daemon = build(
        config,
        clock=monotonic_ns,
        wall_clock=wall_ns,
        entropy=entropy,
        takeover=takeover,
        environment=os.environ,
        reload=load,
    )
    return uvloop.run(daemon.run(on_serving=lambda status: _serving(status, config.admin)))


def _serving(status: Status, admin: AdminConfig) -> None:
    """Say so. What was made until now stays: the garbage collector need not look at it each time (10 ms and more)."""
    gc.collect()
    gc.freeze()
    _announce(status, admin)


def _announce(status: Status, admin: AdminConfig) -> None:
    """Say what is served, where, and what to type next."""
    addresses, card = status.addresses, status.card
    default_admin = (admin.bind_address, admin.port) == ("127.0.0.1", 5558)
    option = "" if default_admin else f" --admin {addresses.admin}"
    if token := admin.read_token_file or admin.token_file:
        option += f" --token-file {shlex.quote(str(token))}"
    start = _start(status)
    size = f"{format_size(card.size_bytes)} in blocks of {card.block_bytes} B"
    control = " and ".join(filter(None, (addresses.control, addresses.control_socket)))
    more = [
        f"  {name:<9} {address}"
        for name, address in (
            ("admin", addresses.admin_socket),
            ("with keys", addresses.control_curve),
            ("metrics", addresses.metrics and f"http://{addresses.metrics}/metrics"),
        )
        if address
    ]
    lines = [
        f"xkv-gateway {status.version} serves",
        f"  card      {card.url}: {size}, {start}",
        *([f"  control   {control}"] if control else []),
        f"  admin     http://{addresses.admin}",
        *more,
        f"  regions   {addresses.regions}",
        f"  state     {status.state_dir}",
        "In another terminal:",
        f"  {program()} status{option}",
        "Ctrl-C ends it.",
    ]
    with contextlib.suppress(OSError):  # nobody can read it: no reason to stop serving
        click.echo("\n".join(lines))


def _start(status: Status) -> str:
    """Say what the start found; while writes are not served yet, also when they will be."""
    recovery, writes_in_s = status.card.recovery, status.card.run.writes_in_s
    found = "cold: it holds nothing yet"
    if status.warm:
        found = (
            f"warm: {recovery.objects} objects ({recovery.checkpoint_objects} in a checkpoint,"
            f" {recovery.journal_batches} journal batches) in {recovery.duration_s:.2f} s"
        )
    return f"{found}, writes in {writes_in_s:.1f} s" if writes_in_s else found


def program() -> str:
    """Return how to call this program from another terminal: its name where that is on the PATH, else its path."""
    path = Path(sys.argv[0]).absolute()
    found = shutil.which("xkv-gateway")
    return "xkv-gateway" if found and Path(found).absolute() == path else str(path)
