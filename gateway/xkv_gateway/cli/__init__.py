"""The command line: `xkv-gateway serve | status | replay | config`.

Commands raise `GatewayError`; only `main` turns errors into a line on standard error and an exit code.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final

import click

from xkv_gateway import __version__
from xkv_gateway.errors import ExitCode, GatewayError
from xkv_gateway.process import (
    end_at_once_on_signals,
    let_go_of_output,
    lost_output,
    open_standard_streams,
)

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


class _Commands(click.Group):
    """Finds its commands in COMMANDS, in that order."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """Return the command, or None where there is no such one."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(COMMANDS[cmd_name]), cmd_name)
        return command


@click.command(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="xkv-gateway")
def cli() -> None:
    """Keep the KV cache of language models on an NVMe-oF card, for many tenants."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code (errors.ExitCode)."""
    try:
        return _run(argv)
    finally:
        let_go_of_output()


def _run(argv: Sequence[str] | None) -> int:
    if argv is None and sys.argv[1:2] == ["serve"]:
        end_at_once_on_signals()
    open_standard_streams()
    try:
        result = cli.main(args=argv, prog_name="xkv-gateway", standalone_mode=False)
    except GatewayError as error:
        _complain(str(error), error.advice)
        return error.exit_code
    except click.ClickException as error:
        with contextlib.suppress(OSError):
            error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return ExitCode.FORCED
    except SystemExit:
        # click ends so where whoever read our output went away (`... | head`): not an error, and nobody to tell.
        return ExitCode.OK
    except Exception as error:
        if isinstance(error, OSError) and (reason := lost_output()):
            _complain(f"the output cannot be written: {reason}", "")
            return ExitCode.OUTPUT
        log.exception("internal error")
        _complain("internal error, a bug; the trace is above", "")
        return ExitCode.INTERNAL
    return result if isinstance(result, int) else ExitCode.OK


def _complain(message: str, advice: str) -> None:
    with contextlib.suppress(OSError):  # nobody can be told: the exit code still says it
        click.echo(f"xkv-gateway: {message}", err=True)
        if advice:
            click.echo(f"  {advice}", err=True)
