"""Looks names up; a name server that is silent holds up nothing but the caller."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, Final

from xkv_nvmeof.aside import Aside

if TYPE_CHECKING:
    from collections.abc import Sequence

LOOKUPS_MAX: Final = 16
"""So many may hang at a time."""
Resolved = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]
_lookups: Final = Aside("name-lookup", LOOKUPS_MAX, "the name servers do not answer")


async def look_up(host: str, port: int) -> Sequence[Resolved]:
    """Return where a TCP connection to `host` may go. Cancelled, it leaves its thread to end by itself.

    Raises:
        OSError: the name stands for nothing, or too many lookups hang already.
        UnicodeError: it is no name.
    """
    return await _lookups.run(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
