"""A TCP port of 127.0.0.1 that stays the test's own while nobody listens on it."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Hold a port: connections are refused, the kernel gives it to nobody else, and a server that names it may listen there.

    A port that is closed before it is used can be another process's by then. This one is bound and does not listen, with
    SO_REUSEADDR, which every server sets that is to be started again at once.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
