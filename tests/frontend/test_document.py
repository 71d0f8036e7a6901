"""The document says what the program does: commands, options, defaults, codes."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Final

import click
import pytest

from xkv_frontend.cli import cli
from xkv_frontend.core.fields import BODIES, Kind
from xkv_frontend.core.policy import Policy
from xkv_frontend.core.routes import ROUTES
from xkv_frontend.errors import ExitCode
from xkv_frontend.policyfile import parse_policy

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = (ROOT / "docs/isolation.md").read_text()
COMMANDS: Final = re.findall(r"^    \$ (xkv-frontend .*)$", PAGE, re.MULTILINE) + re.findall(
    r"`(xkv-frontend [^`]+)`", PAGE
)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_on_the_page_can_be_typed(line: str) -> None:
    words = shlex.split(line)[1:]
    command: click.Command = cli
    while isinstance(command, click.Group):
        name = words.pop(0)
        found = command.get_command(click.Context(command), name)
        assert found is not None, name
        command = found
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options


def test_the_policy_on_the_page_is_the_default_one() -> None:
    lines = PAGE.partition("All of it, with the defaults:\n\n")[2].partition("\n\n`store")[0]
    text = "\n".join(line.removeprefix("    ") for line in lines.splitlines())
    policy = parse_policy(text)
    assert policy.default == Policy().default
    assert (policy.unknown_fields, policy.body_bytes_max) == (
        Policy().unknown_fields,
        Policy().body_bytes_max,
    )
    assert set(tomllib.loads(text)["default"]) | {"requests_per_s"} == set(Policy().default.__slots__)


def test_routes_options_and_exit_codes_are_on_the_page() -> None:
    for route in ROUTES:
        assert f"`{route.path.decode()}`" in PAGE
    for code in ExitCode:
        assert re.search(rf"\b{code.value}\b", PAGE.partition("**Exit codes**")[2])
    for name in re.findall(r"`(--[a-z-]+)", PAGE):
        known = {option for one in ("serve", "verify", "timing") for option in _options(one)}
        assert name in known | {
            "--enable-prompt-tokens-details",
            "--reveal",
            "--middleware",
            "--restart-command",
        }, name


def _options(name: str) -> set[str]:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return {option for parameter in command.params for option in parameter.opts}


def test_the_fields_that_the_page_says_are_dropped_or_refused_are() -> None:
    section = PAGE.partition("- *Dropped*")[2]
    dropped, refused = (
        section.partition("- *Refused*")[0],
        section.partition("- *Refused*")[2].partition("- *Replaced*")[0],
    )
    chat = BODIES[next(iter(BODIES))]
    for name in re.findall(r"`([a-z_]+)`", dropped):
        assert chat[name] is Kind.DROP
    for name in re.findall(r"`([a-z_]+)`[,)]", refused):
        assert chat[name] is Kind.REFUSE


def test_the_unit_uses_variables_that_the_program_reads() -> None:
    unit = (ROOT / "systemd/xkv-frontend.service").read_text()
    for name in re.findall(r"^Environment=XKV_FRONTEND_SERVE_([A-Z_]+)=", unit, re.MULTILINE):
        assert f"--{name.lower().replace('_', '-')}" in _options("serve")
    assert "LoadCredential=cache-salt-secret:" in unit
