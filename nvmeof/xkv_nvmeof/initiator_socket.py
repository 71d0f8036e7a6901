"""A connected TCP socket to a host, by whichever of its addresses answers first."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Final

from xkv_nvmeof.initiator_errors import ConnectFailed, ConnectUnanswered
from xkv_nvmeof.lookup import look_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_nvmeof.lookup import Resolved

ADDRESSES_MAX: Final = 4
"""So many addresses of one name are tried."""


async def connect_socket(
    host: str, port: int, admits: Callable[[str], bool] | None, timeout_s: float
) -> socket.socket:
    """Connect to the first that answers of all that `host` stands for; each has its share of the time.

    Raises:
        ConnectUnanswered: none does.
        ConnectFailed: none of them may be connected to.
    """
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + timeout_s
    try:
        async with asyncio.timeout_at(ends_s):
            found = await _resolve(host, port, admits)
        for left in range(len(found), 1, -1):
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout((ends_s - loop.time()) / left):
                    return await _connect(found[-left])
        async with asyncio.timeout_at(ends_s):
            return await _connect(found[-1])
    except TimeoutError:
        raise ConnectUnanswered("TCP connect: no answer in time") from None
    except (OSError, UnicodeError) as error:
        raise ConnectUnanswered(f"TCP connect: {getattr(error, 'strerror', None) or error}") from error


async def _resolve(host: str, port: int, admits: Callable[[str], bool] | None) -> Sequence[Resolved]:
    """Look the host up; an address in numbers costs no thread. Returns at least one."""
    found: Sequence[Resolved]
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await look_up(host, port)
    admitted = [entry for entry in found if admits is None or admits(str(entry[4][0]))]
    if not admitted:
        raise ConnectFailed(f"TCP connect: {found[0][4][0]} is no address where a card may be")
    return admitted[:ADDRESSES_MAX]


async def _connect(resolved: Resolved) -> socket.socket:
    family, kind, proto, _name, where = resolved
    sock = socket.socket(family, kind, proto)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, where)
    except BaseException:
        sock.close()
        raise
    return sock
