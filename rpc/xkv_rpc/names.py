"""Looks names up for a caller that blocks, which waits no longer than it wants to: a name server that is silent takes much longer."""

from __future__ import annotations

import errno
import socket
import threading
from queue import Empty, SimpleQueue
from typing import Final

LOOKUPS_MAX: Final = 4
"""So many may hang at a time."""
_free: Final = threading.BoundedSemaphore(LOOKUPS_MAX)


def look_up(host: str, port: int, timeout_s: float) -> tuple[str, int]:
    """Return the address, in numbers, that `host` stands for. What is in numbers already costs no thread.

    Raises:
        TimeoutError: It was not found in time.
        OSError: It stands for nothing, or too many lookups hang already.
    """
    try:
        socket.inet_pton(socket.AF_INET, host)
    except OSError:
        return _asked(host, timeout_s), port
    return host, port


def _asked(host: str, timeout_s: float) -> str:
    if not _free.acquire(blocking=False):
        raise OSError(errno.EBUSY, "the name servers do not answer")
    answer: SimpleQueue[str | OSError] = SimpleQueue()

    def work() -> None:
        try:
            answer.put(socket.gethostbyname(host))
        except OSError as error:
            answer.put(error)
        except UnicodeError:
            answer.put(OSError(errno.EINVAL, "no name of a host"))
        finally:
            _free.release()

    # A daemon: one that hangs keeps no process from ending.
    threading.Thread(target=work, name="name-lookup", daemon=True).start()
    try:
        found = answer.get(timeout=timeout_s)
    except Empty:
        raise TimeoutError from None
    if isinstance(found, OSError):
        raise found
    return found
