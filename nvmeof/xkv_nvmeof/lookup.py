"""Looks names up in threads that nobody waits for: the loop's own would hold up its end while a name server is silent."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

LOOKUPS_MAX: Final = 16
"""So many may hang at a time."""
Resolved = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]
_free = threading.BoundedSemaphore(LOOKUPS_MAX)


async def look_up(host: str, port: int) -> Sequence[Resolved]:
    """Return where a TCP connection to `host` may go. Cancelled, it leaves its thread to end by itself.

    Raises:
        OSError: the name stands for nothing, or too many lookups hang already.
        UnicodeError: it is no name.
    """
    if not _free.acquire(blocking=False):
        raise OSError("the name servers do not answer")
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Sequence[Resolved]] = loop.create_future()

    def tell(found: Sequence[Resolved] | Exception) -> None:
        if answer.done():
            return
        if isinstance(found, Exception):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    def work() -> None:
        found: Sequence[Resolved] | Exception
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            found = error
        finally:
            _free.release()
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell, found)

    try:
        threading.Thread(target=work, name="name-lookup", daemon=True).start()
    except RuntimeError as error:
        _free.release()
        raise OSError(str(error)) from None
    return await answer
