"""What the soft card keeps its blocks in: a sparse file with a trailer, or anonymous memory.

The file holds the namespace, and behind it a trailer of 4096 bytes that says what the file is. It is written once,
when the file is made; the ids in it are random and stay with the file.

    offset | size | type  | field
    -------|------|-------|----------------------------------------
    0      | 8    | bytes | magic, "XKVSOFTC"
    8      | 4    | u32   | version, 1
    12     | 4    | u32   | block size in bytes
    16     | 8    | u64   | size of the namespace in bytes
    24     | 16   | bytes | NGUID
    40     | 16   | bytes | UUID
    56     | 4036 | -     | zero
    4092   | 4    | u32   | CRC32C of the 4092 bytes before it
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from dataclasses import dataclass, replace
from struct import Struct
from typing import TYPE_CHECKING, Final

from xkv_nvmeof.digest import crc32c
from xkv_nvmeof.spec import Status
from xkv_process.files import regular_only

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TRAILER_BYTES: Final = 4096
BLOCK_SIZES: Final = (512, 4096)
_MAGIC: Final = b"XKVSOFTC"
_VERSION: Final = 1
_TRAILER: Final = Struct("<8sIIQ16s16s4036x")
_CRC: Final = Struct("<I")
assert _TRAILER.size + _CRC.size == TRAILER_BYTES

_FALLOC_KEEP_SIZE: Final = 0x01
_FALLOC_PUNCH_HOLE: Final = 0x02
_ZERO_STEP_BYTES: Final = 1 << 20
_NO_PUNCH: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class StoreError(Exception):
    """The file cannot be used as this card; the message says why. The person who chose it is at fault."""


def write_status(error: OSError) -> Status:
    """Status of a write, flush or deallocation that failed with `error`."""
    return Status.CAPACITY_EXCEEDED if error.errno in _NO_ROOM else Status.WRITE_FAULT


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """What the trailer says."""

    block_bytes: int
    size_bytes: int
    nguid: bytes
    uuid: bytes

    def to_bytes(self) -> bytes:
        """Encode, 4096 bytes."""
        body = _TRAILER.pack(_MAGIC, _VERSION, self.block_bytes, self.size_bytes, self.nguid, self.uuid)
        return body + _CRC.pack(crc32c(body))

    @classmethod
    def from_bytes(cls, data: bytes) -> StoreIdentity:
        """Decode.

        Raises:
            StoreError: not a trailer, damaged, or of a version that is not known.
        """
        if len(data) != TRAILER_BYTES or data[:8] != _MAGIC:
            raise StoreError("the file is not a soft card, or its end was cut off")
        if _CRC.unpack_from(data, _TRAILER.size)[0] != crc32c(data[: _TRAILER.size]):
            raise StoreError("the trailer of the soft card is damaged")
        _magic, version, block_bytes, size_bytes, nguid, uuid = _TRAILER.unpack_from(data)
        if version != _VERSION:
            raise StoreError(f"the soft card has version {version}, this program knows {_VERSION}")
        if block_bytes not in BLOCK_SIZES or size_bytes == 0 or size_bytes % block_bytes:
            raise StoreError("the trailer of the soft card makes no sense")
        return cls(block_bytes, size_bytes, nguid, uuid)


def new_identity(size_bytes: int, block_bytes: int, entropy: Callable[[int], bytes]) -> StoreIdentity:
    """Return an identity with random ids.

    Raises:
        StoreError: the size is no positive multiple of a block, or the block size is not known.
    """
    if block_bytes not in BLOCK_SIZES:
        raise StoreError(f"blocks have {' or '.join(map(str, BLOCK_SIZES))} bytes, not {block_bytes}")
    if size_bytes <= 0 or size_bytes % block_bytes:
        raise StoreError(f"the size, {size_bytes} bytes, is no positive multiple of {block_bytes}")
    uuid = bytearray(entropy(16))
    uuid[6] = uuid[6] & 0x0F | 0x40
    uuid[8] = uuid[8] & 0x3F | 0x80
    return StoreIdentity(block_bytes, size_bytes, entropy(16), bytes(uuid))


class Store:
    """The blocks. Every method but `read_now` may block; all are safe to call from several threads."""

    def __init__(self, descriptor: int, identity: StoreIdentity, *, may_wait: bool = True) -> None:
        self.may_wait = may_wait
        """Whether there is a disk that a write could have to wait for."""
        self._fd = descriptor
        self.identity = identity
        self._can_punch = True
        self._can_read_now = True

    @classmethod
    def open_file(
        cls, path: Path, size_bytes: int | None, block_bytes: int | None, entropy: Callable[[int], bytes]
    ) -> Store:
        """Open the file, or with a size make it when it does not exist (or is empty); it is locked until `close`.

        Raises:
            StoreError: it is in use, is not a soft card, or is one of another size.
            OSError: the file system says no.
        """
        try:
            fd = _open(path, os.O_RDWR | (0 if size_bytes is None else os.O_CREAT))
        except FileNotFoundError as error:
            if size_bytes is not None:
                raise
            raise StoreError(f"{path} does not exist, and a new card needs a size") from error
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StoreError(_in_use(path)) from error
            have_bytes = os.fstat(fd).st_size
            if have_bytes == 0:
                identity = _format(fd, path, size_bytes, block_bytes, entropy)
            else:
                identity = _recognise(fd, have_bytes, size_bytes, block_bytes)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, identity)

    @classmethod
    def open_read_only(cls, path: Path) -> Store:
        """Open a file that exists, to look at it: it is never made, changed or touched, and shared with others who look.

        Raises:
            StoreError: it is in use, or is not a soft card.
            OSError: the file system says no.
        """
        fd = _open(path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StoreError(_in_use(path)) from error
            identity = _recognise(fd, os.fstat(fd).st_size, None, None)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, identity)

    @classmethod
    def in_memory(cls, size_bytes: int, block_bytes: int, entropy: Callable[[int], bytes]) -> Store:
        """Blocks in anonymous memory, used as they are written; gone with the process."""
        identity = new_identity(size_bytes, block_bytes, entropy)
        fd = os.memfd_create("xkv-soft-card", os.MFD_CLOEXEC)
        os.ftruncate(fd, size_bytes)
        return cls(fd, identity, may_wait=False)

    def read_now(self, offset_bytes: int, view: memoryview) -> bool:
        """Read if that needs no waiting for the disk; whether it did.

        Raises:
            OSError: the read failed.
        """
        if not self.may_wait:
            self.read(offset_bytes, view)
            return True
        if not self._can_read_now:
            return False
        try:
            return os.preadv(self._fd, [view], offset_bytes, os.RWF_NOWAIT) == len(view)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            self._can_read_now = False
            return False

    def read(self, offset_bytes: int, view: memoryview) -> None:
        """Fill `view`.

        Raises:
            OSError: the read failed, or the file is shorter than it should be.
        """
        done = 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done:]], offset_bytes + done)
            if count == 0:
                raise OSError(errno.EIO, "the file is shorter than the namespace")
            done += count

    def write(self, offset_bytes: int, view: memoryview, *, durable: bool) -> None:
        """Write all of `view`; when it returns and `durable`, it is on stable storage.

        Raises:
            OSError: the write failed; a part of it may have been done.
        """
        flags = os.RWF_DSYNC if durable else 0
        done = 0
        while done < len(view):
            done += os.pwritev(self._fd, [view[done:]], offset_bytes + done, flags)

    def flush(self) -> None:
        """Make everything that was written durable.

        Raises:
            OSError: it failed, and what was written may be lost.
        """
        os.fdatasync(self._fd)

    def zero(self, offset_bytes: int, length_bytes: int) -> None:
        """Make the range read as zeroes, without room on the disk where the file system can.

        Raises:
            OSError: it failed; a part of it may have been done.
        """
        if self._can_punch:
            mode = _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE
            if _libc.fallocate(self._fd, mode, offset_bytes, length_bytes) == 0:
                return
            number = ctypes.get_errno()
            if number not in _NO_PUNCH:
                raise OSError(number, os.strerror(number))
            self._can_punch = False
        zeroes = memoryview(bytes(_ZERO_STEP_BYTES))
        for at in range(0, length_bytes, _ZERO_STEP_BYTES):
            step = min(_ZERO_STEP_BYTES, length_bytes - at)
            self.write(offset_bytes + at, zeroes[:step], durable=False)

    def resize(self, size_bytes: int) -> None:
        """Make the namespace larger (what is new reads as zeroes) or smaller (what is beyond the end is lost).

        The new trailer is durable before the old one goes, so that a kill leaves a card of one of the two sizes.

        Raises:
            StoreError: the size is no positive multiple of a block.
            OSError: the file system says no; the size is what it was.
        """
        before = self.identity
        if size_bytes <= 0 or size_bytes % before.block_bytes:
            raise StoreError(f"the size, {size_bytes} bytes, is no positive multiple of {before.block_bytes}")
        now = replace(before, size_bytes=size_bytes)
        if not self.may_wait:  # in memory, without a trailer
            os.ftruncate(self._fd, size_bytes)
        elif size_bytes > before.size_bytes:
            os.pwrite(self._fd, now.to_bytes(), size_bytes)
            os.fsync(self._fd)
            self.zero(before.size_bytes, min(TRAILER_BYTES, size_bytes - before.size_bytes))
        elif size_bytes < before.size_bytes:
            os.pwrite(self._fd, now.to_bytes(), size_bytes)
            os.fsync(self._fd)
            os.ftruncate(self._fd, size_bytes + TRAILER_BYTES)
        self.identity = now

    def used_bytes(self) -> int:
        """Room that the blocks take now."""
        return os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        """Make everything durable and let the file go.

        Raises:
            OSError: the last flush failed.
        """
        try:
            os.fdatasync(self._fd)
        finally:
            os.close(self._fd)


def _open(path: Path, flags: int) -> int:
    """Open a regular file only: a pipe would be waited for, and a disk, whose size is told as 0, taken for a new file."""
    fd = regular_only(str(path), flags)
    os.set_blocking(fd, True)
    return fd


def _in_use(path: Path) -> str:
    return f"{path} is in use by another soft card: end the gateway or the command that has it"


def _format(
    fd: int, path: Path, size_bytes: int | None, block_bytes: int | None, entropy: Callable[[int], bytes]
) -> StoreIdentity:
    if size_bytes is None:
        raise StoreError(f"{path} is empty, and a new card needs a size")
    identity = new_identity(size_bytes, 4096 if block_bytes is None else block_bytes, entropy)
    os.pwrite(fd, identity.to_bytes(), size_bytes)
    os.fsync(fd)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return identity


def _recognise(fd: int, have_bytes: int, size_bytes: int | None, block_bytes: int | None) -> StoreIdentity:
    identity = StoreIdentity.from_bytes(os.pread(fd, TRAILER_BYTES, max(0, have_bytes - TRAILER_BYTES)))
    if identity.size_bytes + TRAILER_BYTES != have_bytes:
        raise StoreError("the file is longer or shorter than its trailer says")
    if size_bytes not in (None, identity.size_bytes):
        have = f"the soft card has {identity.size_bytes} bytes, not {size_bytes}"
        raise StoreError(f"{have}: leave the size out to use it as it is")
    if block_bytes not in (None, identity.block_bytes):
        raise StoreError(f"the soft card has blocks of {identity.block_bytes} bytes, not {block_bytes}")
    return identity
