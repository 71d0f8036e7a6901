"""CRC32C, the header and data digest of NVMe/TCP (NVMe/TCP Transport 1.0, 3.3.1.1: Castagnoli, reflected).

On the wire a digest is four bytes, little endian. The digest of nothing is 0.
"""

from __future__ import annotations

from enum import Enum
from struct import Struct
from typing import TYPE_CHECKING, Final, cast

from crc32c import crc32c as _crc32c

if TYPE_CHECKING:
    from collections.abc import Iterable

DIGEST_BYTES: Final = 4
_WIRE: Final = Struct("<I")


class DigestPolicy(Enum):
    """What a side wants of a digest. It is used when the host asks for it and the controller grants it."""

    REQUIRED = "required"
    """A peer that does not take part is refused."""
    PREFERRED = "preferred"
    """Asked for, or granted when asked for."""
    OFF = "off"


def crc32c(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """Return the CRC32C of `data`, going on from `value`, the CRC32C of what came before it."""
    return _crc32c(data, value)


def crc32c_of(buffers: Iterable[bytes | bytearray | memoryview], value: int = 0) -> int:
    """Return the CRC32C of the concatenation of `buffers`, which is never made."""
    for buffer in buffers:
        value = _crc32c(buffer, value)
    return value


def to_wire(value: int) -> bytes:
    """Return the four bytes that carry the digest `value`."""
    return _WIRE.pack(value)


def from_wire(data: bytes | bytearray | memoryview, offset_bytes: int = 0) -> int:
    """Return the digest that the four bytes at `offset_bytes` carry."""
    return cast("int", _WIRE.unpack_from(data, offset_bytes)[0])
