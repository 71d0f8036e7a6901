"""What whoever started the card may tell it on its stdin, a line each; the end of stdin ends the card.

resize SIZE    make the namespace larger or smaller; hosts hear of it
detach         take the namespace away
attach         bring it back
access N STATE what hosts that came by the Nth --listen (from 0) may do with it: optimized, non-optimized, inaccessible,
               persistent-loss or change; with several --listen only
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING, Final

import click

from xkv_nvmeof.multipath import Access
from xkv_nvmeof.softcard.options import parse_size
from xkv_nvmeof.softcard.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_nvmeof.softcard.server import Server
    from xkv_nvmeof.softcard.store import Store

_LOG: Final = logging.getLogger(__name__)
_CHUNK_BYTES: Final = 4096
_LINE_BYTES_MAX: Final = 256
"""What is longer is no line of ours: it is dropped."""


class Console:
    """Reads stdin in a thread of its own; `ended` is called from the loop when it ends."""

    def __init__(self, server: Server, store: Store, ended: Callable[[], None]) -> None:
        self._server = server
        self._store = store
        self._ended = ended
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        """Begin to read."""
        threading.Thread(target=self._read, name="stdin", daemon=True).start()

    def _read(self) -> None:
        rest = b""
        while chunk := os.read(0, _CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[:_LINE_BYTES_MAX]
            for line in lines:
                self._obey(line[:_LINE_BYTES_MAX].decode("ascii", "replace").split())
        self._in_loop(self._ended)

    def _obey(self, words: list[str]) -> None:
        try:
            match words:
                case ["resize", size]:
                    self._resize(parse_size(size))
                case ["detach" | "attach" as word]:
                    self._change(attached=word == "attach")
                case ["access", number, state] if number.isdecimal():
                    self._set_access(int(number), state)
                case []:
                    return
                case _:
                    _LOG.warning("stdin: %s is no command", " ".join(words))
                    return
            _LOG.info("stdin: %s: done", " ".join(words))
        except (StoreError, OSError, click.BadParameter) as error:
            _LOG.error("stdin: %s: %s", " ".join(words), error)

    def _resize(self, size_bytes: int) -> None:
        """The blocks are there before hosts hear of them, and not gone before hosts have heard of that."""
        block_bytes, before = self._store.identity.block_bytes, self._store.identity.size_bytes
        if size_bytes > before:
            self._store.resize(size_bytes)
            self._change(block_count=size_bytes // block_bytes)
        else:
            if size_bytes % block_bytes == 0 < size_bytes:
                self._change(block_count=size_bytes // block_bytes)
            self._store.resize(size_bytes)

    def _set_access(self, number: int, state: str) -> None:
        portals = self._server.portals
        name = state.upper().replace("-", "_")
        if len(portals) < 2 or number >= len(portals) or name not in Access.__members__:
            raise click.BadParameter("no such way to the card, or no such access")
        self._do(lambda: self._server.card.set_access(portals[number], Access[name]))

    def _change(self, *, block_count: int | None = None, attached: bool | None = None) -> None:
        self._do(lambda: self._server.card.change_namespace(block_count=block_count, attached=attached))

    def _do(self, change: Callable[[], None]) -> None:
        """Change the card, in the loop, and wait until that is done."""
        done = threading.Event()

        def run() -> None:
            change()
            self._server.pump()
            done.set()

        if self._in_loop(run):
            done.wait()

    def _in_loop(self, call: Callable[[], None]) -> bool:
        """Call from the loop; False: it has ended meanwhile, and nothing is left to be told."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)
            return True
        return False
