"""Telling the service manager: ready, stopping, alive. Nothing happens where there is none."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"
ALIVE: Final = "WATCHDOG=1"
MICROSECONDS: Final = 1e6


def notify(message: str) -> None:
    """Send `message` to the socket in NOTIFY_SOCKET, a path or an abstract name (`@...`); a deaf one is no error."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as out,
    ):
        out.sendto(message.encode(), address)


async def keep_alive(say: Callable[[str], None] = notify) -> None:
    """Say that we live, twice in each period of WATCHDOG_USEC; from the loop that serves, so that a stuck one is silent.

    WATCHDOG_PID may say that it is another process of whom that is expected.
    """
    text = os.environ.get("WATCHDOG_USEC", "")
    own = str(os.getpid())
    if not text.isdecimal() or int(text) == 0 or os.environ.get("WATCHDOG_PID", own) != own:
        return
    while True:
        say(ALIVE)
        await asyncio.sleep(int(text) / MICROSECONDS / 2)
