"""Sending on a non-blocking socket, the same for the server's connections and those of the asyncio client."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import socket
    from collections import deque

    from xkv_rpc.calls import Buffer

VECTORS_MAX: Final = 512
"""Buffers in one system call; the kernel takes 1024."""


def send_queued(sock: socket.socket, queue: deque[Buffer]) -> int:
    """Send what the socket takes now; return how many bytes. What it did not take stays in the queue.

    Raises:
        OSError: the connection is over.
    """
    total_bytes = 0
    try:
        while queue:
            sent = sock.sendmsg(list(islice(queue, VECTORS_MAX)))
            total_bytes += sent
            while queue and sent >= len(queue[0]):
                sent -= len(queue.popleft())
            if sent:
                queue[0] = memoryview(queue[0])[sent:]
    except (BlockingIOError, InterruptedError):
        pass
    return total_bytes
