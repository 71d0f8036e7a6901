"""Opening a card that keeps no index yet: where its data lies, and whose it is.

    offset              length    what
    0                   1 MiB     reserved; all zero on a card that is ours to use
    1 MiB               n x AU    data area
    size - 1 MiB        1 MiB     reserved; all zero on a card that is ours to use

File systems, partition tables, volume managers and other users of a disk leave their marks in its first or last
megabyte. Whatever bears one is refused, and never written to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from xkv_gateway.card.runs import DataArea
from xkv_gateway.errors import CardUnavailableError

if TYPE_CHECKING:
    from xkv_nvmeof.blockdev import BlockDevice, Geometry

RESERVED_BYTES: Final = 1 << 20
UNITS_MIN: Final = 16


@dataclass(frozen=True, slots=True)
class CardLayout:
    """What the card is divided into."""

    area: DataArea
    capacity_au: int


def layout_of(geometry: Geometry, au_bytes: int) -> CardLayout:
    """Divide a namespace.

    Raises:
        CardUnavailableError: it is too small, or its blocks do not fit the allocation unit.
    """
    if au_bytes % geometry.block_bytes:
        raise CardUnavailableError(
            f"the card's blocks have {geometry.block_bytes} bytes, and the allocation unit of {au_bytes} bytes is no"
            " multiple of that",
            advice="Set card.au to a multiple of the block size.",
        )
    capacity_au = (geometry.size_bytes - 2 * RESERVED_BYTES) // au_bytes
    if capacity_au < UNITS_MIN:
        raise CardUnavailableError(
            f"the card has {geometry.size_bytes} bytes: too small for {UNITS_MIN} allocation units of {au_bytes} bytes",
            advice="Use a larger card, or a smaller card.au.",
        )
    return CardLayout(DataArea(RESERVED_BYTES, au_bytes, geometry.block_bytes), capacity_au)


async def require_unclaimed(device: BlockDevice) -> None:
    """Check that the card bears nobody's mark. Reads only.

    Raises:
        CardUnavailableError: it does.
        DeviceError: it cannot be read.
    """
    geometry = device.geometry
    block_bytes = geometry.block_bytes
    last_bytes = (geometry.size_bytes - RESERVED_BYTES) // block_bytes * block_bytes
    for where, offset_bytes in (("first", 0), ("last", last_bytes)):
        buffer = bytearray(min(RESERVED_BYTES, geometry.size_bytes - offset_bytes))
        await device.read_into(offset_bytes, [memoryview(buffer)])
        if any(buffer):
            raise CardUnavailableError(
                f"there is data in the {where} megabyte of the card: somebody else uses it, so it is left alone",
                advice="Check the address and the NQN. If the data is of no use, zero the first and the last megabyte.",
            )
