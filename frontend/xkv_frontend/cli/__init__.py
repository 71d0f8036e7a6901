"""The command line. Commands are imported when they are used; errors become one line and an exit code."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import click

from xkv_frontend import __version__
from xkv_process.command import LazyGroup, run

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)


COMMANDS: Final = {
    "serve": "xkv_frontend.cli.serve",
    "secret": "xkv_frontend.cli.secrets",
    "salt": "xkv_frontend.cli.secrets",
    "keys": "xkv_frontend.cli.keys",
    "verify": "xkv_frontend.cli.checks",
    "timing": "xkv_frontend.cli.checks",
}


class _Commands(LazyGroup):
    modules = COMMANDS


@click.command(
    cls=_Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "auto_envvar_prefix": "XKV_FRONTEND",
    },
)
@click.version_option(__version__, prog_name="xkv-frontend")
def cli() -> None:
    """Stand between clients and vLLM, and salt every request from the identity of its sender."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code (errors.ExitCode)."""
    return run(cli, "xkv-frontend", argv, log)
