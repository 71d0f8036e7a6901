"""What a host queue pair has to send: PDU by PDU, in order, never copied."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final

from xkv_nvmeof import digest
from xkv_nvmeof.pdu import PLAIN, WireFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_VIEWS: Final = 512
"""Buffers of one system call (Linux takes 1024)."""


class Outbox:
    """A queue of buffers whose places count from the first byte of the connection.

    Bounded by its user: each command in flight has at most its capsule and the data that was asked for in it.
    """

    def __init__(self) -> None:
        self.wire: WireFormat = PLAIN
        self.queued_bytes = 0
        """All bytes that were ever queued."""
        self.sent_bytes = 0
        """All bytes that the connection took."""
        self._buffers: deque[bytes | memoryview] = deque()
        """A header is `bytes` until a part of it was sent, everything else is views: so it is known where PDUs begin."""

    def __bool__(self) -> bool:
        return bool(self._buffers)

    def put(self, header: bytes, data: Sequence[memoryview] = (), data_bytes: int = 0) -> int:
        """Queue a PDU, adding the data digest where granted; return the place behind it."""
        buffers = self._buffers
        buffers.append(header)
        end = self.queued_bytes + len(header)
        if data_bytes:
            buffers.extend(data)
            end += data_bytes
            if self.wire.data_digest:
                buffers.append(memoryview(digest.to_wire(digest.crc32c_of(data))))
                end += digest.DIGEST_BYTES
        self.queued_bytes = end
        return end

    def views(self) -> list[bytes | memoryview]:
        """Return the next buffers to send, in order."""
        buffers = self._buffers
        return list(buffers) if len(buffers) <= MAX_VIEWS else list(islice(buffers, MAX_VIEWS))

    def sent(self, count: int) -> None:
        """Tell that the connection took the next `count` bytes."""
        self.sent_bytes += count
        if self.sent_bytes == self.queued_bytes:
            self._buffers.clear()
            return
        buffers = self._buffers
        while count:
            first = buffers[0]
            size = len(first)
            if count < size:
                buffers[0] = memoryview(first)[count:]
                return
            buffers.popleft()
            count -= size

    def drop(self) -> bool:
        """Forget all that was not sent; tell whether the connection stands between two PDUs."""
        buffers = self._buffers
        between_pdus = not buffers or isinstance(buffers[0], bytes)
        buffers.clear()
        self.queued_bytes = self.sent_bytes
        return between_pdus
