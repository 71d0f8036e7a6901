"""Command line of the soft card: `python -m xkv_nvmeof.softcard`."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import click
import uvloop

from xkv_nvmeof.controller_card import Card
from xkv_nvmeof.controller_types import CardConfig, NamespaceInfo
from xkv_nvmeof.softcard.executor import Executor
from xkv_nvmeof.softcard.server import SOCKET_BUFFER_BYTES, Server
from xkv_nvmeof.softcard.store import Store, StoreError
from xkv_nvmeof.spec import DISCOVERY_NQN, NQN_MAX_BYTES

_LOG: Final = logging.getLogger("xkv_nvmeof.softcard")
_UNITS: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, checked."""

    file: Path | None
    size_bytes: int | None
    block_bytes: int | None
    host: str
    port: int
    nqn: str | None
    allowed_hosts: frozenset[str] | None
    exit_with_stdin: bool
    read_only: bool = False


class CardBroken(Exception):  # noqa: N818
    """The program did what it must never do; the log says what."""


def parse_size(text: str) -> int:
    """Return bytes: a number, perhaps with KiB, MiB, GiB or TiB.

    Raises:
        click.BadParameter: something else.
    """
    match = re.fullmatch(r"(\d{1,15})(KiB|MiB|GiB|TiB)?", text)
    if match is None:
        raise click.BadParameter(f"{text!r} is no size: a number of bytes, or one with KiB, MiB, GiB or TiB")
    return int(match[1]) * _UNITS[match[2] or ""]


def parse_listen(text: str, *, allow_remote: bool) -> tuple[str, int]:
    """Return the numeric address and the port of `ADDRESS:PORT` (IPv6 in brackets).

    Raises:
        click.BadParameter: something else, or an address beyond this machine without permission.
    """
    host, separator, port_text = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} does not begin with a numeric address") from error
    if not separator or not port_text.isdecimal() or int(port_text) > 65535:
        raise click.BadParameter(f"{text!r} does not end with a port")
    if not address.is_loopback and not allow_remote:
        raise click.BadParameter(f"{host} is not a loopback address: --allow-remote is needed for that")
    return str(address), int(port_text)


def _bind(options: Options) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    listener.bind((options.host, options.port))
    return listener


def _config(options: Options, store: Store) -> CardConfig:
    identity = store.identity
    namespace = NamespaceInfo(
        block_bytes=identity.block_bytes,
        block_count=identity.size_bytes // identity.block_bytes,
        nguid=identity.nguid,
        uuid=identity.uuid,
        used_blocks=lambda: store.used_bytes() // identity.block_bytes,
    )
    nqn = options.nqn or f"nqn.2014-08.org.nvmexpress:uuid:{UUID(bytes=identity.uuid)}"
    serial = identity.uuid.hex()[:20].upper()
    return CardConfig(nqn, namespace, serial, allowed_hosts=options.allowed_hosts)


def _watch_stdin(stop: asyncio.Event) -> None:
    """Stop when stdin ends: whoever started us is gone, however it died."""
    loop = asyncio.get_running_loop()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile: nothing is left to be stopped
            loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=watch, name="stdin", daemon=True).start()


def _log_counters(event: str, card: Card) -> None:
    line = json.dumps({"event": event, "counters": card.counters.as_dict()})
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


async def _serve(options: Options, store: Store, listener: socket.socket) -> None:
    """Serve until told to stop.

    Raises:
        CardBroken: a callback failed, which is a mistake of ours: no card is better than one that hangs.
    """
    config = _config(options, store)
    host, port = listener.getsockname()[:2]
    card = Card(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    broken: list[str] = []

    def on_failure(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        _LOG.critical("%s", context["message"], exc_info=context.get("exception"))
        broken.append(context["message"])
        stop.set()

    loop.set_exception_handler(on_failure)
    loop.add_signal_handler(signal.SIGUSR1, _log_counters, "counters", card)
    server = Server(card, Executor(store, time.monotonic_ns), time.monotonic_ns)
    server.listen(listener)
    if options.exit_with_stdin:
        _watch_stdin(stop)
    namespace = config.namespace
    ready = {
        "host": host,
        "port": port,
        "nqn": config.nqn,
        "nsid": namespace.nsid,
        "nguid": namespace.nguid.hex(),
        "uuid": str(UUID(bytes=namespace.uuid)),
        "size_bytes": namespace.size_bytes,
        "block_bytes": namespace.block_bytes,
    }
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
    _LOG.info("ready on %s port %d", host, port)
    await stop.wait()
    await server.aclose()
    _log_counters("exit", card)
    if broken:
        raise CardBroken(broken[0])


def _run(options: Options) -> None:
    if options.file is None:
        if options.size_bytes is None:
            raise StoreError("a card in memory needs a size")
        store = Store.in_memory(options.size_bytes, options.block_bytes or 4096, os.urandom)
    elif options.read_only:
        store = Store.open_read_only(options.file)
    else:
        store = Store.open_file(options.file, options.size_bytes, options.block_bytes, os.urandom)
    try:
        with _bind(options) as listener:
            logging.basicConfig(
                stream=sys.stderr,
                level=logging.INFO,
                format="%(asctime)s %(levelname)s %(name)s: %(message)s",
            )
            uvloop.run(_serve(options, store, listener))
    finally:
        store.close()


@click.command()
@click.option(
    "--file", type=click.Path(path_type=Path, dir_okay=False), help="Sparse file; made when it is not there."
)
@click.option("--memory", is_flag=True, help="Keep the blocks in memory instead; they end with the process.")
@click.option("--size", help="Size of the namespace, such as 16GiB; may be left out for a file that exists.")
@click.option("--block-bytes", type=int, help="Size of a block: 512 or 4096 (the default for a new card).")
@click.option(
    "--listen", default="127.0.0.1:0", show_default=True, help="Numeric ADDRESS:PORT; 0 = any free port."
)
@click.option(
    "--allow-remote",
    is_flag=True,
    help="Permit an address that others can reach. There is no access control but the host's name.",
)
@click.option("--nqn", help="Name of the subsystem; by default one made of the card's UUID.")
@click.option(
    "--allow-host", multiple=True, help="Name (NQN) of a host that may connect; by default every host may."
)
@click.option(
    "--read-only",
    is_flag=True,
    help="Refuse every write; for a file that exists. It is opened for reading only.",
)
@click.option(
    "--exit-with-stdin", is_flag=True, help="End when stdin ends, so as to die with whoever started it."
)
def main(
    file: Path | None,
    memory: bool,
    size: str | None,
    block_bytes: int | None,
    listen: str,
    allow_remote: bool,
    nqn: str | None,
    allow_host: tuple[str, ...],
    exit_with_stdin: bool,
    read_only: bool,
) -> None:
    """Serve a soft card over NVMe/TCP until SIGTERM or SIGINT.

    When it is ready, one line of JSON on stdout says where. For development and small set-ups.
    """
    if memory == (file is not None):
        raise click.UsageError("give either --file or --memory")
    if read_only and (memory or size is not None or block_bytes is not None):
        raise click.UsageError("--read-only goes with --file alone: the file says what it is")
    if nqn is not None and (
        not nqn.startswith("nqn.") or len(nqn.encode()) > NQN_MAX_BYTES or nqn == DISCOVERY_NQN
    ):
        raise click.BadParameter(f"{nqn!r} is no NVMe qualified name for a card")
    host, port = parse_listen(listen, allow_remote=allow_remote)
    options = Options(
        file,
        None if size is None else parse_size(size),
        block_bytes,
        host,
        port,
        nqn,
        frozenset(allow_host) or None,
        exit_with_stdin,
        read_only,
    )
    try:
        _run(options)
    except (StoreError, CardBroken, OSError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
