"""Commands in this process: what a person types, and what comes back."""

from __future__ import annotations

import asyncio
import io
import json
import os
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from tests.e2e.gateway import Finished, environment
from xkv_gateway.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.gateway import Gateway


async def command(home: Path, *arguments: str, **extra: str) -> Finished:
    """Run a command to its end, in a thread of this process: starting an interpreter takes longer than most of them."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        for name in set(os.environ) - set(environment(home)):
            patch.delenv(name)
        patch.setenv("HOME", str(home))
        patch.setattr("sys.stdin", io.StringIO())
        for name, value in extra.items():
            patch.setenv(name, value)
        code = await asyncio.to_thread(main, arguments)
    return Finished(code, out.getvalue(), err.getvalue())


class Commands:
    """Runs commands of an operator."""

    def __init__(self, home: Path, gateway: Gateway) -> None:
        self._home = home
        self._gateway = gateway

    def __call__(self, *arguments: str, stdin: bytes = b"") -> Finished:
        """Run a command to its end. It blocks: the gateway is another process."""
        admin = () if arguments[0] == "salt" else ("--admin", self._gateway.admin)
        runner = CliRunner()
        with runner.isolation(input=stdin, env=environment(self._home)) as (out, err, _):
            code = main([*arguments, *admin])
            return Finished(code, out.getvalue().decode(), err.getvalue().decode())

    def json(self, *arguments: str, stdin: bytes = b"") -> Any:
        """Run a command that succeeds, with `--json`; return what it prints."""
        done = self(*arguments, "--json", stdin=stdin)
        assert done.code == 0, done.err
        return json.loads(done.out)
