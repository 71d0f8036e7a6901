"""Command line of the soft card: `python -m xkv_nvmeof.softcard`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import click
import uvloop

from xkv_nvmeof.controller_card import Card
from xkv_nvmeof.controller_types import CardConfig, NamespaceInfo
from xkv_nvmeof.digest import DigestPolicy
from xkv_nvmeof.softcard.console import Console
from xkv_nvmeof.softcard.executor import Executor
from xkv_nvmeof.softcard.options import (
    PORTALS_MAX,
    Options,
    parse_listen,
    parse_nqn,
    parse_size,
    read_keys,
)
from xkv_nvmeof.softcard.server import SOCKET_BUFFER_BYTES, Server
from xkv_nvmeof.softcard.store import Store, StoreError

_LOG: Final = logging.getLogger("xkv_nvmeof.softcard")


class CardBroken(Exception):  # noqa: N818
    """The program did what it must never do; the log says what."""


def _bind(where: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        listener.bind(where)
    except OSError:
        listener.close()
        raise
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
    return CardConfig(
        nqn,
        namespace,
        serial,
        allowed_hosts=options.allowed_hosts,
        header_digest=options.header_digest,
        data_digest=options.data_digest,
        authentication=options.authentication,
        reservations=options.reservations,
        access_reporting=len(options.listen) > 1,
    )


def _log_counters(event: str, card: Card) -> None:
    line = json.dumps({"event": event, "counters": card.counters.as_dict()})
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


async def _serve(options: Options, store: Store, listeners: list[socket.socket]) -> None:
    """Serve until told to stop.

    Raises:
        CardBroken: a callback failed, which is a mistake of ours: no card is better than one that hangs.
    """
    config = _config(options, store)
    portals = [listener.getsockname()[:2] for listener in listeners]
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
    for listener in listeners:
        server.listen(listener)
    if options.exit_with_stdin:
        Console(server, store, stop.set).start()
    namespace = config.namespace
    ready = {
        "host": portals[0][0],
        "port": portals[0][1],
        "portals": portals,
        "nqn": config.nqn,
        "nsid": namespace.nsid,
        "nguid": namespace.nguid.hex(),
        "uuid": str(UUID(bytes=namespace.uuid)),
        "size_bytes": namespace.size_bytes,
        "block_bytes": namespace.block_bytes,
    }
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
    _LOG.info("ready on %s", ", ".join(f"{host} port {port}" for host, port in portals))
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
        with contextlib.ExitStack() as sockets:
            listeners = [sockets.enter_context(_bind(where)) for where in options.listen]
            logging.basicConfig(
                stream=sys.stderr,
                level=logging.INFO,
                format="%(asctime)s %(levelname)s %(name)s: %(message)s",
            )
            uvloop.run(_serve(options, store, listeners))
    finally:
        store.close()


_DIGEST: Final = click.Choice([policy.value for policy in DigestPolicy])


@click.command()
@click.option(
    "--file", type=click.Path(path_type=Path), help="Sparse file; with a size made when it is not there."
)
@click.option("--memory", is_flag=True, help="Keep the blocks in memory instead; they end with the process.")
@click.option("--size", help="Size of the namespace, such as 16GiB; may be left out for a file that exists.")
@click.option("--block-bytes", type=int, help="Size of a block: 512 or 4096 (the default for a new card).")
@click.option(
    "--listen",
    multiple=True,
    default=["127.0.0.1:0"],
    show_default=True,
    help="Numeric ADDRESS:PORT; 0 = any free port. Several times: the same card at each.",
)
@click.option(
    "--allow-remote",
    is_flag=True,
    help="Permit an address that others can reach. Without keys there is no access control but the host's name.",
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
    "--exit-with-stdin",
    is_flag=True,
    help="End when stdin ends, so as to die with whoever started it; before that, obey what comes there: resize SIZE, detach, attach.",
)
@click.option(
    "--dhchap-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File (0600) with the key, DHHC-1:..., that every host must know.",
)
@click.option(
    "--dhchap-ctrl-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File (0600) with the key with which the card proves itself to hosts that ask for it.",
)
@click.option(
    "--no-reservations",
    is_flag=True,
    help="Be a card that cannot be reserved, as one that is only read is in any case.",
)
@click.option(
    "--header-digest", type=_DIGEST, default="preferred", show_default=True, help="CRC32C of headers."
)
@click.option(
    "--data-digest", type=_DIGEST, default="preferred", show_default=True, help="CRC32C of payload."
)
def main(**given: Any) -> None:
    """Serve a soft card over NVMe/TCP until SIGTERM or SIGINT.

    When it is ready, one line of JSON on stdout says where. For development and small set-ups.
    """
    try:
        _run(_checked(given))
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        raise click.ClickException(f"{where}{error.strerror or error}") from error
    except (StoreError, CardBroken) as error:
        raise click.ClickException(str(error)) from error


def _checked(given: dict[str, Any]) -> Options:
    """Return the options.

    Raises:
        click.UsageError: they make no sense, one by one or together.
    """
    file: Path | None = given["file"]
    size: str | None = given["size"]
    if given["memory"] == (file is not None):
        raise click.UsageError("give either --file or --memory")
    if given["read_only"] and (file is None or size is not None or given["block_bytes"] is not None):
        raise click.UsageError("--read-only goes with --file alone: the file says what it is")
    if len(given["listen"]) > PORTALS_MAX:
        raise click.UsageError(f"--listen: at most {PORTALS_MAX} addresses")
    return Options(
        file=file,
        size_bytes=None if size is None else parse_size(size),
        block_bytes=given["block_bytes"],
        listen=tuple(parse_listen(text, allow_remote=given["allow_remote"]) for text in given["listen"]),
        nqn=parse_nqn(given["nqn"]),
        allowed_hosts=frozenset(given["allow_host"]) or None,
        exit_with_stdin=given["exit_with_stdin"],
        read_only=given["read_only"],
        reservations=not (given["no_reservations"] or given["read_only"]),
        authentication=read_keys(given["dhchap_key_file"], given["dhchap_ctrl_key_file"]),
        header_digest=DigestPolicy(given["header_digest"]),
        data_digest=DigestPolicy(given["data_digest"]),
    )


if __name__ == "__main__":
    main()
