"""A command line from its first step to its exit code: errors become a line on standard error."""

from __future__ import annotations

import contextlib
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

import click

from xkv_process.errors import CommandError
from xkv_process.signals import end_at_once_on_signals
from xkv_process.streams import let_go_of_output, lost_output, open_standard_streams
from xkv_process.text import ascii_only

if TYPE_CHECKING:
    import logging
    from collections.abc import Mapping, Sequence


class LazyGroup(click.Group):
    """Finds its commands in `modules`, in that order."""

    modules: ClassVar[Mapping[str, str]] = {}
    """Command -> the module that has it under its name. Imported when it is used: `status` needs no engine."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names."""
        return list(self.modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """Return the command, or None where there is no such one."""
        if cmd_name not in self.modules:
            return None
        command: click.Command = getattr(import_module(self.modules[cmd_name]), cmd_name)
        return command


def run(cli: click.Command, program: str, argv: Sequence[str] | None, log: logging.Logger) -> int:
    """Run the command line; return the exit code.

    Args:
        cli: what to run; a command may return its exit code.
        program: its name in messages.
        argv: the arguments; None: those of the process.
        log: gets the trace of a bug.
    """
    try:
        return _run(cli, program, argv, log)
    finally:
        let_go_of_output()


def _run(cli: click.Command, program: str, argv: Sequence[str] | None, log: logging.Logger) -> int:
    if argv is None and sys.argv[1:2] == ["serve"]:
        end_at_once_on_signals()
    open_standard_streams()
    try:
        result = cli.main(args=argv, prog_name=program, standalone_mode=False)
    except CommandError as error:
        _complain(program, str(error), error.advice)
        return error.exit_code
    except click.ClickException as error:
        with contextlib.suppress(OSError):
            error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return os.EX_TEMPFAIL
    except SystemExit:
        # click ends so where whoever read our output went away (`... | head`): not an error, and nobody to tell.
        return os.EX_OK
    except Exception as error:
        if isinstance(error, OSError) and (reason := lost_output()):
            _complain(program, f"the output cannot be written: {reason}")
            return os.EX_IOERR
        log.exception("internal error")
        _complain(program, "internal error, a bug; the trace is above")
        return os.EX_SOFTWARE
    return result if isinstance(result, int) else os.EX_OK


def _complain(program: str, message: str, advice: str = "") -> None:
    with contextlib.suppress(OSError):  # nobody can be told: the exit code still says it
        for line in (f"{program}: {message}", *([f"  {advice}"] if advice else ())):
            # It may hold what a target or a file has said.
            click.echo(ascii_only(line), err=True)
