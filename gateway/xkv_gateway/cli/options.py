"""What several commands share: settings from file, environment and flags."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from xkv_gateway.config import Loaded, load_config
from xkv_gateway.state import choose_state_dir

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.decorators import FC

    from xkv_gateway.config.tree import KeyPath


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag that sets a setting."""

    name: str
    path: KeyPath
    metavar: str
    help: str


FLAGS: Final = {
    "card": Flag(
        "--card",
        ("card", "url"),
        "URL",
        "nvme+tcp://ADDR:4420/NQN?nsid=1, kernel+tcp://..., /dev/... or soft:PATH?size=16GiB.",
    ),
    "card_wait": Flag(
        "--card-wait",
        ("card", "wait"),
        "HOW",
        "Whether the start waits for a card that nobody answers for: auto, always or never.",
    ),
    "bind_address": Flag(
        "--bind-address", ("control", "bind_address"), "ADDRESS", "Address of the control port."
    ),
    "port": Flag("--port", ("control", "port"), "PORT", "Control port; 0 lets the kernel choose."),
    "admin_bind_address": Flag(
        "--admin-bind-address", ("admin", "bind_address"), "ADDRESS", "Address of the admin port (HTTP)."
    ),
    "admin_port": Flag("--admin-port", ("admin", "port"), "PORT", "Admin port; 0 lets the kernel choose."),
    "eviction_policy": Flag(
        "--eviction-policy", ("eviction", "policy"), "POLICY", "LRU, IsolatedLRU or noop."
    ),
    "eviction_trigger_watermark": Flag(
        "--eviction-trigger-watermark",
        ("eviction", "trigger_watermark"),
        "SHARE",
        "Share in use at which objects go in the background ...",
    ),
    "eviction_ratio": Flag(
        "--eviction-ratio", ("eviction", "eviction_ratio"), "SHARE", "... and the share of it that goes."
    ),
    "eviction_interval": Flag(
        "--eviction-interval", ("eviction", "interval_s"), "SECONDS", "How often it is looked."
    ),
    "eviction_enforcement": Flag(
        "--eviction-enforcement", ("eviction", "enforcement"), "HOW", "Of quotas: hard or soft."
    ),
    "eviction_unregistered_limit": Flag(
        "--eviction-unregistered-limit",
        ("eviction", "unregistered_limit"),
        "SIZE",
        "With IsolatedLRU: quota of tenants without one.",
    ),
    "admission_bytes_per_day": Flag(
        "--admission-bytes-per-day",
        ("admission", "bytes_per_day"),
        "SIZE",
        "What stores may write within 24 hours; 0: no limit.",
    ),
    "state_dir": Flag("--state-dir", ("state_dir",), "DIR", "Directory of what is kept between runs."),
}
"""Parameter name -> flag."""


def config_option() -> Callable[[FC], FC]:
    """Return the decorator of `--config`."""
    return click.option(
        "--config", "file", type=click.Path(path_type=Path), metavar="FILE", help="Settings (TOML)."
    )


def setting_options(command: FC) -> FC:
    """Add the flags of `FLAGS`. Values stay text: the settings judge them, so that there is one kind of message."""
    for name, flag in reversed(FLAGS.items()):
        command = click.option(flag.name, name, metavar=flag.metavar, help=flag.help)(command)
    return config_option()(command)


def load_settings(file: Path | None, flags: dict[str, str | None]) -> Loaded:
    """Return the settings of this invocation. Raises ConfigError."""
    given = {
        FLAGS[name].path: (FLAGS[name].name, value) for name, value in flags.items() if value is not None
    }
    return load_config(file=file, environment=os.environ, flags=given)


def state_dir_of(loaded: Loaded) -> Path:
    """Return the state directory of this invocation."""
    return choose_state_dir(loaded.config.state_dir, os.environ, Path.home())
