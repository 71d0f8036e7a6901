"""Reads and writes an open block device without Linux's cache, in threads. Blocking calls, each safe from any thread.

The caller's buffers are used as they are where the device takes them so. Linux says that before it transfers anything, so it
is tried; what it does not take goes through an aligned buffer of the thread.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import threading
from struct import Struct
from typing import TYPE_CHECKING, Final

from xkv_nvmeof.host_command import cut

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BOUNCE_BYTES: Final = 1 << 20
SEGMENTS_MAX: Final = 1024
"""Buffers of one system call (IOV_MAX)."""
CALL_BYTES_MAX: Final = 64 << 20
"""Bytes of one system call; Linux takes 2 GiB."""
IOCTL_BYTES_MAX: Final = 1 << 30
"""Bytes of one discard or zeroing, so that none takes long."""
_BLKDISCARD: Final = 0x1277
_BLKZEROOUT: Final = 0x127F
_RANGE: Final = Struct("=QQ")


class NotABlockDevice(Exception):  # noqa: N818
    """The path names something else."""


class BlockFile:
    """An open block device. `close` once no call is running."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._local = threading.local()

    @classmethod
    def open_node(cls, path: Path, device_number: int | None, *, read_only: bool) -> BlockFile:
        """Open a node, for this process alone unless `read_only`.

        Args:
            path: of the node; nothing is ever made there.
            device_number: of the block device that it has to be; None: any.
            read_only: open it beside others.

        Raises:
            NotABlockDevice: it is no block device, or another one.
            OSError: Linux refuses; EBUSY: somebody uses it (mounted, part of another device, open for another process alone).
        """
        flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_EXCL
        descriptor = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC | os.O_NONBLOCK)
        found = os.fstat(descriptor)
        if not stat.S_ISBLK(found.st_mode) or device_number not in (None, found.st_rdev):
            os.close(descriptor)
            raise NotABlockDevice(f"{path} is not the block device that it should be")
        return cls(descriptor)

    def close(self) -> None:
        """Give the device back."""
        os.close(self.descriptor)

    @property
    def device_number(self) -> int:
        """Major and minor number."""
        return os.fstat(self.descriptor).st_rdev

    def read(self, offset_bytes: int, views: list[memoryview], total_bytes: int) -> None:
        """Fill `views`, writable and of bytes. Raises OSError."""
        self._transfer(os.preadv, self._read_bounced, offset_bytes, views, total_bytes)

    def write(self, offset_bytes: int, views: list[memoryview], total_bytes: int) -> None:
        """Write `views`. Raises OSError."""
        self._transfer(os.pwritev, self._write_bounced, offset_bytes, views, total_bytes)

    def flush(self) -> None:
        """Make what was written durable: the device's own cache is flushed. Raises OSError."""
        os.fdatasync(self.descriptor)

    def discard(self, offset_bytes: int, length_bytes: int) -> None:
        """Tell the device that the range holds nothing. Raises OSError."""
        self._in_steps(_BLKDISCARD, offset_bytes, length_bytes)

    def zero(self, offset_bytes: int, length_bytes: int) -> None:
        """Zero the range; Linux writes zeroes where the device has no command for it. Raises OSError."""
        self._in_steps(_BLKZEROOUT, offset_bytes, length_bytes)

    def _in_steps(self, request: int, offset_bytes: int, length_bytes: int) -> None:
        for at in range(0, length_bytes, IOCTL_BYTES_MAX):
            size = min(IOCTL_BYTES_MAX, length_bytes - at)
            fcntl.ioctl(self.descriptor, request, _RANGE.pack(offset_bytes + at, size))

    def _transfer(
        self,
        call: Callable[[int, list[memoryview], int], int],
        bounced: Callable[[int, list[memoryview], int], None],
        offset_bytes: int,
        views: list[memoryview],
        total_bytes: int,
    ) -> None:
        at = 0
        while at < total_bytes:
            whole = not at and len(views) <= SEGMENTS_MAX and total_bytes <= CALL_BYTES_MAX
            some = views if whole else cut(views, at, min(CALL_BYTES_MAX, total_bytes - at))
            if len(some) > SEGMENTS_MAX:
                bounced(offset_bytes + at, cut(views, at, total_bytes - at), total_bytes - at)
                return
            try:
                moved = call(self.descriptor, some, offset_bytes + at)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                bounced(offset_bytes + at, cut(views, at, total_bytes - at), total_bytes - at)
                return
            if moved <= 0:
                raise OSError(errno.EIO, "the device ends there")
            at += moved

    def _bounce(self) -> memoryview:
        try:
            return self._local.bounce  # type: ignore[no-any-return]
        except AttributeError:
            self._local.bounce = memoryview(mmap.mmap(-1, BOUNCE_BYTES))
            return self._local.bounce  # type: ignore[no-any-return]

    def _read_bounced(self, offset_bytes: int, views: list[memoryview], total_bytes: int) -> None:
        for at in range(0, total_bytes, BOUNCE_BYTES):
            part = self._bounce()[: min(BOUNCE_BYTES, total_bytes - at)]
            self._whole(os.preadv, offset_bytes + at, part)
            done = 0
            for view in cut(views, at, len(part)):
                view[:] = part[done : done + len(view)]
                done += len(view)

    def _write_bounced(self, offset_bytes: int, views: list[memoryview], total_bytes: int) -> None:
        for at in range(0, total_bytes, BOUNCE_BYTES):
            part = self._bounce()[: min(BOUNCE_BYTES, total_bytes - at)]
            done = 0
            for view in cut(views, at, len(part)):
                part[done : done + len(view)] = view
                done += len(view)
            self._whole(os.pwritev, offset_bytes + at, part)

    def _whole(
        self, call: Callable[[int, list[memoryview], int], int], offset_bytes: int, part: memoryview
    ) -> None:
        done = 0
        while done < len(part):
            moved = call(self.descriptor, [part[done:]], offset_bytes + done)
            if moved <= 0:
                raise OSError(errno.EIO, "the device ends there")
            done += moved
