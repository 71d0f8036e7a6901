"""What several commands share: settings from file, environment and flags."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from xkv_gateway.config import Loaded, load_config
from xkv_gateway.state import choose_state_dir

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.decorators import FC

    from xkv_gateway.config.tree import KeyPath

FLAGS: Final[dict[str, tuple[str, KeyPath, str]]] = {
    "card": ("--card", ("card", "url"), "The card: nvme+tcp://ADDR:4420/NQN?nsid=1 or soft:PATH?size=16GiB."),
    "bind_address": ("--bind-address", ("control", "bind_address"), "Address of the control port."),
    "port": ("--port", ("control", "port"), "Control port; 0 lets the kernel choose."),
    "admin_bind_address": (
        "--admin-bind-address",
        ("admin", "bind_address"),
        "Address of the admin port (HTTP).",
    ),
    "admin_port": ("--admin-port", ("admin", "port"), "Admin port; 0 lets the kernel choose."),
    "state_dir": ("--state-dir", ("state_dir",), "Directory of what is kept between runs."),
}
"""Parameter name -> flag, the setting that it sets, help."""


def config_option() -> Callable[[FC], FC]:
    """Return the decorator of `--config`."""
    return click.option("--config", "file", type=click.Path(path_type=Path), help="Settings (TOML).")


def setting_options(command: FC) -> FC:
    """Add the flags of `FLAGS`. Values stay text: the settings judge them, so that there is one kind of message."""
    for name, (flag, _, text) in reversed(FLAGS.items()):
        command = click.option(flag, name, help=text, default=None)(command)
    return config_option()(command)


def load_settings(file: Path | None, flags: dict[str, str | None]) -> Loaded:
    """Return the settings of this invocation. Raises ConfigError."""
    given = {FLAGS[name][1]: (FLAGS[name][0], value) for name, value in flags.items() if value is not None}
    return load_config(file=file, environment=os.environ, flags=given)


def state_dir_of(loaded: Loaded) -> Path:
    """Return the state directory of this invocation."""
    return choose_state_dir(loaded.config.state_dir, os.environ, Path.home())
