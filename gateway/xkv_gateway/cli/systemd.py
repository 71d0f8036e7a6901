"""`xkv-gateway systemd`: writes the units and what belongs to them, and takes them away again."""

from __future__ import annotations

import shlex
import shutil
import sys
from importlib.resources import files
from pathlib import Path
from typing import Final

import click

from xkv_gateway.errors import ConfigError

MARK: Final = "written by `xkv-gateway systemd install`"
PROGRAM: Final = "/usr/bin/xkv-gateway"
FRONT_END: Final = "/usr/local/bin/xkv-frontend"
"""As the units write them; installed, they name the program that installed them, and the front end beside it."""
HIDDEN: Final = ("/root/", "/home/", "/run/user/", "/tmp/")  # noqa: S108 - what the units cannot see
MANAGED: Final = {
    "xkv-gateway.service": "etc/systemd/system/xkv-gateway.service",
    "xkv-gateway@.service": "etc/systemd/system/xkv-gateway@.service",
    "xkv-card-attach@.service": "etc/systemd/system/xkv-card-attach@.service",
    "xkv-frontend.service": "etc/systemd/system/xkv-frontend.service",
    "xkv-gateway.sysusers": "etc/sysusers.d/xkv-gateway.conf",
    "xkv-gateway.tmpfiles": "etc/tmpfiles.d/xkv-gateway.conf",
}
"""Ours: replaced by the next install, removed by uninstall."""
EXAMPLES: Final = {
    "gateway.toml": "etc/xkv-gateway/gateway.toml",
    "soft-card.toml": "etc/xkv-gateway/soft.toml",
    "kernel-card.conf": "etc/xkv-gateway/kernel-card.conf",
}
"""The operator's, once they are there."""


@click.group()
def systemd() -> None:
    """Run the gateway as a service."""


def _root_option() -> click.Option:
    return click.Option(
        ["--root", "root"],
        type=click.Path(path_type=Path),
        default=Path("/"),
        metavar="DIR",
        help="Below another root directory, for images.",
    )


def _install(root: Path) -> None:
    program = _program()
    try:
        for name, target in MANAGED.items():
            path = root / target
            _refuse_foreign(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_unit(name, program), encoding="utf-8")
            path.chmod(0o644)
            click.echo(f"wrote {path}")
        for name, target in EXAMPLES.items():
            path = root / target
            if path.exists():
                click.echo(f"kept {path}")
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_source(name), encoding="utf-8")
            path.chmod(0o644)
            click.echo(f"wrote {path}: {'set the card there' if name.endswith('.toml') else 'see there'}")
    except OSError as error:
        raise _failed(error) from None
    if program.startswith(HIDDEN):
        click.echo(
            f"{program} lies where services cannot see it (ProtectHome, PrivateTmp): install the gateway elsewhere,"
            " and run this again from there",
            err=True,
        )
    click.echo(
        "then:\n  systemd-sysusers && systemd-tmpfiles --create\n  systemctl daemon-reload\n"
        "  systemctl enable --now xkv-gateway"
    )


def _uninstall(root: Path) -> None:
    try:
        for target in MANAGED.values():
            path = root / target
            if path.exists():
                _refuse_foreign(path)
                path.unlink()
                click.echo(f"removed {path}")
    except OSError as error:
        raise _failed(error) from None
    click.echo("settings, keys and state were kept; then: systemctl daemon-reload")


for _name, _action, _help in (
    ("install", _install, "Write the units, and example settings where there are none."),
    ("uninstall", _uninstall, "Remove what install wrote; settings, keys and state stay."),
):
    systemd.add_command(click.Command(_name, callback=_action, params=[_root_option()], help=_help))


def _source(name: str) -> str:
    return files("xkv_gateway").joinpath("data", "systemd", name).read_text(encoding="utf-8")


def _unit(name: str, program: str) -> str:
    front_end = str(Path(program).with_name("xkv-frontend"))
    return _source(name).replace(PROGRAM, program).replace(FRONT_END, front_end)


def _refuse_foreign(path: Path) -> None:
    if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        raise ConfigError(
            f"{path} was not written by this command and was left alone", advice="Move it away first."
        )


def _program() -> str:
    """Return the absolute path of this program, as a unit writes it."""
    path = Path(sys.argv[0]).absolute()
    found = path if path.name == "xkv-gateway" else Path(shutil.which("xkv-gateway") or PROGRAM)
    text = str(found)
    if shlex.quote(text) != text or "%" in text:
        raise ConfigError(f"{text} cannot be written into a unit", advice="Install under a plain path.")
    return text


def _failed(error: OSError) -> ConfigError:
    return ConfigError(f"cannot write {error.filename}: {error.strerror}", advice="Run this as root.")
