"""A service manager's notify socket."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from tests.e2e.gateway import HANG_S

if TYPE_CHECKING:
    from pathlib import Path


class Manager:
    """Remembers what it was told, in order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.said: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(path))

    async def until(self, words: str, count: int = 1) -> None:
        """Return once it was told so, that often."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(HANG_S):
            while sum(words in line for line in self.said) < count:
                self.said += (await loop.sock_recv(self._socket, 65536)).decode().split("\n")

    def close(self) -> None:
        self._socket.close()
