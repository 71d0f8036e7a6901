"""Payload buffers of the soft card: page-aligned, reused, bounded in total and for each connection."""

from __future__ import annotations

import mmap
from typing import Final

POOL_BYTES: Final = 256 << 20
"""Most payload memory of the whole process."""
CONNECTION_BYTES: Final = 16 << 20
"""Most payload memory of one connection: what it holds while data is on its way in or out."""
_MIN_CLASS_BYTES: Final = 4096
_KEPT_BYTES: Final = 64 << 20
"""Free buffers up to this total are kept for reuse; what is beyond goes back to the system."""


def _class_bytes(length_bytes: int) -> int:
    return max(_MIN_CLASS_BYTES, 1 << (length_bytes - 1).bit_length())


class BufferPool:
    """Free lists of buffers, one for each power of two. The last one released is the next one used: it is warm."""

    def __init__(self, limit_bytes: int = POOL_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._free: dict[int, list[mmap.mmap]] = {}
        self._free_bytes = 0
        self.used_bytes = 0

    def allocate(self, length_bytes: int) -> memoryview | None:
        """Return a buffer of exactly that length, or None when the limit is reached."""
        size = _class_bytes(length_bytes)
        if self.used_bytes + size > self._limit_bytes:
            return None
        self.used_bytes += size
        free = self._free.get(size)
        if free:
            self._free_bytes -= size
            block = free.pop()
        else:
            block = mmap.mmap(-1, size)
        return memoryview(block)[:length_bytes]

    def release(self, buffer: memoryview) -> int:
        """Take a buffer back; returns what it had taken of the limit. The view must not be used afterwards."""
        block = buffer.obj
        assert isinstance(block, mmap.mmap)
        size = len(block)
        buffer.release()
        self.used_bytes -= size
        if self._free_bytes + size <= _KEPT_BYTES:
            self._free.setdefault(size, []).append(block)
            self._free_bytes += size
        return size


class ConnectionBuffers:
    """One connection's share of the pool; what the controller core takes buffers from."""

    def __init__(self, pool: BufferPool, limit_bytes: int = CONNECTION_BYTES) -> None:
        self._pool = pool
        self._limit_bytes = limit_bytes
        self.used_bytes = 0

    def allocate(self, length_bytes: int) -> memoryview | None:
        """Return a buffer of exactly that length, or None when a limit is reached."""
        size = _class_bytes(length_bytes)
        if self.used_bytes + size > self._limit_bytes:
            return None
        buffer = self._pool.allocate(length_bytes)
        if buffer is not None:
            self.used_bytes += size
        return buffer

    def release(self, buffer: memoryview) -> None:
        """Take a buffer back."""
        self.used_bytes -= self._pool.release(buffer)
