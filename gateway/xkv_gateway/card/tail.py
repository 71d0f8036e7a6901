"""The end of the journal, looked at again: has anybody written there since it was read?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xkv_gateway.card.journal_scan import End, Need, Scanner

if TYPE_CHECKING:
    from xkv_gateway.card.blocks import CardBlocks
    from xkv_gateway.card.journal_format import ChainPoint
    from xkv_gateway.card.superblock import Superblock


async def tail_moved(blocks: CardBlocks, superblock: Superblock, point: ChainPoint) -> bool:
    """Tell whether anything continues the journal at its end. One batch at a time is on its way, so only that place matters.

    Raises:
        DeviceError: it could not be read.
    """
    region = superblock.layout.journal
    scanner = Scanner(region.length_bytes, superblock.stamp.card_uuid, point, search=False)
    while isinstance(event := scanner.next_event(), Need):
        scanner.feed(await blocks.read(region.offset_bytes + event.offset_bytes, event.length_bytes))
    return not isinstance(event, End) or event.point != point
