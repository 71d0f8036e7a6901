"""Commands in this process, against a gateway in another one: what a person types, and what comes back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from click.testing import CliRunner

from tests.e2e.gateway import Finished, environment
from xkv_gateway.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.gateway import Gateway


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
