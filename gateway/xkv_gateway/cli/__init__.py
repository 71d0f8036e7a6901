"""The command line: `xkv-gateway serve | status | replay | config`.

Commands raise `GatewayError`; only `main` turns errors into a line on standard error and an exit code.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import click

from xkv_gateway import __version__
from xkv_process.command import LazyGroup, run

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)


COMMANDS: Final = {
    "serve": "xkv_gateway.cli.serve",
    "status": "xkv_gateway.cli.status",
    "top": "xkv_gateway.cli.top",
    "ns": "xkv_gateway.cli.ns",
    "tenant": "xkv_gateway.cli.tenant",
    "quota": "xkv_gateway.cli.quota",
    "salt": "xkv_gateway.cli.salt",
    "replay": "xkv_gateway.replay.command",
    "card": "xkv_gateway.cli.card",
    "target": "xkv_gateway.cli.target",
    "fabric": "xkv_gateway.cli.fabric",
    "doctor": "xkv_gateway.cli.doctor",
    "config": "xkv_gateway.cli.config",
    "keys": "xkv_gateway.cli.keys",
    "systemd": "xkv_gateway.cli.systemd",
}
"""Command -> the module that has it under its name. Imported when it is used: `status` needs no engine."""


class _Commands(LazyGroup):
    modules = COMMANDS


@click.command(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="xkv-gateway")
def cli() -> None:
    """Keep the KV cache of language models on an NVMe-oF card, for many tenants."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code (errors.ExitCode)."""
    return run(cli, "xkv-gateway", argv, log)
