"""`xkv-gateway fabric`: what a target offers, and the connections that Linux holds to targets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import click

from xkv_gateway.cardurl import NVME_TCP_PORT, KernelCardUrl, parse_card_url
from xkv_gateway.cli.options import config_option, state_dir_of
from xkv_gateway.cli.tables import print_facts, print_json, print_table
from xkv_gateway.clock import entropy, monotonic_ns
from xkv_gateway.config import load_config
from xkv_gateway.errors import CardUnavailableError, ConfigError, ExitCode
from xkv_gateway.networks import StorageNetworks
from xkv_gateway.sizes import format_size
from xkv_gateway.state import configured_identity, make_state_dir
from xkv_gateway.target import linux
from xkv_gateway.target.attach import initiator_options
from xkv_nvmeof.blockdev import DeviceError
from xkv_nvmeof.dhchap.crypto import Hash
from xkv_nvmeof.dhchap.secret import new_dhchap_secret
from xkv_nvmeof.initiator_discovery import discover as discover_at
from xkv_nvmeof.kernel.nvmecli import LIST, LIST_SUBSYSTEMS, VERSION, parse_view
from xkv_nvmeof.kernel.sysfs import read_view
from xkv_nvmeof.kernel.tool import NvmeTool
from xkv_nvmeof.logpages import SUBTYPE_NVM, TRTYPE_TCP

if TYPE_CHECKING:
    from pathlib import Path

    from click.decorators import FC

    from xkv_gateway.config.tree import KeyPath
    from xkv_nvmeof.initiator_options import InitiatorOptions
    from xkv_nvmeof.kernel.view import View
    from xkv_nvmeof.logpages import DiscoveryEntry

TOOL_TIMEOUT_S: Final = 10.0
DISCOVER_TIMEOUT_S: Final = 60.0
"""Each answer has a deadline of its own; this is for all of them."""
FABRIC_SCHEMES: Final = {"nvme+tcp", "kernel+tcp", "tcp"}


@click.group()
def fabric() -> None:
    """Ask a target what it offers; have Linux connect to it (kernel+tcp://...), and see what it is connected to."""


def _options(command: FC) -> FC:
    as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
    state_dir = click.option("--state-dir", metavar="DIR", help="Where this host's NVMe identity is kept.")
    return config_option()(state_dir(as_json(command)))


def _settings(
    file: Path | None, state_dir: str | None
) -> tuple[InitiatorOptions, StorageNetworks, str | None]:
    """Return the options of a host with an identity, the storage networks, and the configured card."""
    flags: dict[KeyPath, tuple[str, object]] = {}
    if state_dir is not None:
        flags["state_dir",] = ("--state-dir", state_dir)
    loaded = load_config(file=file, environment=os.environ, flags=flags)
    nvme, directory = loaded.config.nvme, state_dir_of(loaded)
    if nvme.host_nqn is None:
        make_state_dir(directory)
    identity = configured_identity(nvme.host_nqn, nvme.host_id, directory, entropy)
    storage = StorageNetworks(loaded.config.fabric.networks)
    options = replace(initiator_options(nvme, identity), admits=storage.admits_target)
    return options, storage, loaded.config.card.url


def _judge(storage: StorageNetworks, host: str, what: str) -> None:
    """Refuse at once what is an address already; a name is judged when it stands for one."""
    with contextlib.suppress(ValueError):
        storage.judge_target(host, what)


def _url(given: str | None, configured: str | None) -> KernelCardUrl:
    text = given or configured
    if text is None:
        raise ConfigError(
            "which card? Give a URL, or --config with a card.url", advice="kernel+tcp://ADDR:4420/NQN?nsid=1"
        )
    try:
        url = parse_card_url(text)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(url, KernelCardUrl):
        raise ConfigError(
            f"{url} is not for Linux to connect", advice="Write kernel+tcp://ADDR:4420/NQN?nsid=1."
        )
    return url


# --- discover -----------------------------------------------------------------------------------------------------


@fabric.command()
@click.argument("address")
@_options
def discover(address: str, file: Path | None, state_dir: str | None, as_json: bool) -> ExitCode:
    """Show what the target at ADDRESS (HOST, HOST:PORT, or the URL of a card) offers this host over NVMe/TCP. Needs no root."""
    options, storage, _card = _settings(file, state_dir)
    host, port = _host_and_port(_authority(address))
    _judge(storage, host, f"the target {address}")
    entries = asyncio.run(_discover(host, port, options, address))
    offered = [
        {"nqn": entry.subnqn, "address": entry.address, "port": entry.service}
        for entry in entries
        if entry.subsystem_type == SUBTYPE_NVM and entry.transport == TRTYPE_TCP
    ]
    if as_json:
        print_json(offered)
    elif offered:
        print_table(("NQN", "address", "port"), [tuple(one.values()) for one in offered], numbers_from=2)
    else:
        click.echo("it offers nothing to this host")
    return ExitCode.OK


async def _discover(host: str, port: int, options: InitiatorOptions, address: str) -> list[DiscoveryEntry]:
    try:
        async with asyncio.timeout(DISCOVER_TIMEOUT_S):
            return await discover_at(host, port, options, clock=monotonic_ns)
    except DeviceError as error:
        raise CardUnavailableError(f"{address}: {error}", advice="Is a target running there?") from None
    except TimeoutError:
        text = f"{address}: it answers, but did not tell all within {DISCOVER_TIMEOUT_S:.0f} s"
        raise CardUnavailableError(text, advice="Look at the target's load and at its log.") from None


def _authority(text: str) -> str:
    """Return where a card's URL leads to (with several addresses, the first); anything else is that already."""
    scheme, found, rest = text.partition("://")
    if not found:
        return text
    if scheme not in FABRIC_SCHEMES:
        raise ConfigError(
            f"{text}: there is no target to ask", advice="Write HOST, HOST:PORT or nvme+tcp://..."
        )
    return rest.partition("/")[0].partition(",")[0]


def _host_and_port(text: str) -> tuple[str, int]:
    """Return host and port of `HOST`, `HOST:PORT`, `[V6]:PORT`."""
    host, _, port = text.rpartition(":")
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        port = port.removeprefix(":")
    elif not host or ":" in host:
        host, port = text, ""
    if not port:
        return host, NVME_TCP_PORT
    if not port.isdecimal() or not 0 < int(port) <= 65535 or not host:
        raise ConfigError(f"{text}: write HOST, HOST:PORT or [ADDRESS]:PORT")
    return host, int(port)


# --- connect and disconnect ---------------------------------------------------------------------------------------


@fabric.command()
@click.argument("url", required=False)
@click.option("--group", metavar="GROUP", help="Let this group read and write the device.")
@_options
def connect(
    url: str | None, group: str | None, file: Path | None, state_dir: str | None, as_json: bool
) -> ExitCode:
    """Have Linux connect URL (default: card.url), and wait for the device. Needs root. It stays connected.

    A gateway with the same card.url and the same nvme.host_nqn and nvme.host_id uses the connection, and leaves it.
    """
    options, storage, configured = _settings(file, state_dir)
    card = _url(url, configured)
    _judge(storage, card.host, f"the card {card}")
    found = asyncio.run(linux.connect(card, options, group))
    namespace = found.namespace
    facts = {
        "device": found.node,
        "controller": found.controller,
        "connected": "now" if found.new else "before",
        "size_bytes": namespace.size_bytes,
        "block_bytes": namespace.block_bytes,
        "nguid": namespace.nguid.hex(),
        "uuid": str(uuid.UUID(bytes=namespace.uuid)),
        "host_nqn": options.host_nqn,
    }
    if as_json:
        print_json(facts)
    else:
        print_facts(str(card), [(name, str(value)) for name, value in facts.items()])
    return ExitCode.OK


@fabric.command()
@click.argument("url", required=False)
@_options
def disconnect(url: str | None, file: Path | None, state_dir: str | None, as_json: bool) -> ExitCode:
    """Undo what `fabric connect` did, and nothing else. Needs root. A device in use is refused."""
    options, _storage, configured = _settings(file, state_dir)
    name = asyncio.run(linux.disconnect(_url(url, configured), options))
    if as_json:
        print_json({"disconnected": name})
    else:
        click.echo("it is not connected by this host" if name is None else f"disconnected {name}")
    return ExitCode.OK


# --- keys ---------------------------------------------------------------------------------------------------------


@fabric.command("new-key")
@click.option(
    "--hash",
    "name",
    type=click.Choice([one.hashlib_name for one in Hash]),
    default="sha256",
    show_default=True,
    help="What the key is for.",
)
def new_key(name: str) -> ExitCode:
    """Print a new key of DH-HMAC-CHAP, for a file (mode 0600) that [fabric] names, and for the target."""
    click.echo(new_dhchap_secret(next(one for one in Hash if one.hashlib_name == name), entropy))
    return ExitCode.OK


# --- list ---------------------------------------------------------------------------------------------------------


@fabric.command("list")
@click.option(
    "--nvme-cli", "ask_tool", is_flag=True, help="As nvme-cli tells it, instead of sysfs: to compare."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_(ask_tool: bool, as_json: bool) -> ExitCode:
    """Show the NVMe subsystems that Linux knows, the ways to them and the devices behind them."""
    view = asyncio.run(_ask_tool()) if ask_tool else read_view()
    if as_json:
        print_json([_document(number, view) for number in range(len(view))])
        return ExitCode.OK
    rows = []
    for subsystem in view:
        devices = ", ".join(
            f"{one.node} (nsid {one.nsid}, {format_size(one.size_bytes)})" for one in subsystem.namespaces
        )
        rows += [
            (
                subsystem.nqn,
                one.name,
                one.transport,
                f"{one.traddr}:{one.trsvcid}".strip(":"),
                one.state,
                devices or "none",
            )
            for one in subsystem.controllers
        ] or [(subsystem.nqn, "none", "", "", "", devices or "none")]
    if rows:
        print_table(("NQN", "controller", "by", "address", "state", "devices"), rows, numbers_from=6)
    else:
        click.echo("no NVMe subsystem")
    return ExitCode.OK


def _document(number: int, view: View) -> dict[str, Any]:
    subsystem = view[number]
    return {
        "nqn": subsystem.nqn,
        "controllers": [
            {
                "name": one.name,
                "transport": one.transport,
                "address": one.traddr,
                "port": one.trsvcid,
                "state": one.state,
                "host_nqn": one.host_nqn,
            }
            for one in subsystem.controllers
        ],
        "namespaces": [
            {
                "nsid": one.nsid,
                "device": f"/dev/{one.node}",
                "size_bytes": one.size_bytes,
                "block_bytes": one.block_bytes,
                "nguid": one.nguid.hex(),
                "uuid": str(uuid.UUID(bytes=one.uuid)),
            }
            for one in subsystem.namespaces
        ],
    }


async def _ask_tool() -> View:
    tool = NvmeTool()
    try:
        version, subsystems, devices = [
            await tool.run(arguments, TOOL_TIMEOUT_S) for arguments in (VERSION, LIST_SUBSYSTEMS, LIST)
        ]
        for ended in (subsystems, devices):
            if ended.code:
                raise CardUnavailableError(f"nvme-cli: {ended.said}")
        line = version.out.decode(errors="replace").split("\n")[0][:60]
        return parse_view(subsystems.out, devices.out, line.removeprefix("nvme ").removeprefix("version "))
    except DeviceError as error:
        raise CardUnavailableError(str(error)) from None
