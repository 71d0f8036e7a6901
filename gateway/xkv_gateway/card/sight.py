"""Looks at a card without opening it: whose it is, or what else is on it. Nothing is written."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from xkv_gateway.card import ownership
from xkv_gateway.card.fence import INTERVAL_MS
from xkv_gateway.card.format_errors import FormatError, UnknownFeature, UnknownVersion
from xkv_gateway.card.layout import HEAD_BYTES, HEARTBEAT_OFFSET, TAIL_BYTES
from xkv_gateway.card.marks import SOMETHING, recognise
from xkv_gateway.card.structure import BLOCK_BYTES
from xkv_gateway.card.superblock import Blank, Chosen, Match, match
from xkv_gateway.card.table_file import FileKind
from xkv_gateway.card.table_read import by_age, decode_ends
from xkv_gateway.card.tables import OBJECTS

if TYPE_CHECKING:
    from xkv_gateway.card.blocks import CardBlocks
    from xkv_gateway.card.layout import Region
    from xkv_gateway.card.superblock import NamespaceFacts, Superblock
    from xkv_gateway.card.table_read import FileFacts
    from xkv_nvmeof.blockdev import BlockDevice


class Kind(Enum):
    """What a card is to us."""

    OURS = "card"
    """Formatted, and its superblock can be read."""
    BLANK = "blank"
    """Both ends are zero, and so are samples of what is between."""
    DAMAGED = "damaged"
    """It bears our stamp, and no superblock can be used."""
    UNKNOWN = "unknown_version"
    """Written by a program that knows more than this one."""
    STRANGER = "stranger"
    """Somebody else's data."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What is on a card."""

    kind: Kind
    facts: NamespaceFacts
    chosen: Chosen | None = None
    """OURS: the newest superblock."""
    matched: Match | None = None
    error: FormatError | None = None
    """OURS: why it does not belong to this namespace; DAMAGED, UNKNOWN: what is wrong."""
    marks: tuple[str, ...] = ()
    """STRANGER: what it looks like."""

    @property
    def superblock(self) -> Superblock | None:
        """The newest one, if there is one."""
        return None if self.chosen is None else self.chosen.superblock

    @property
    def clean(self) -> bool:
        """Whether the last run on it ended in order."""
        return self.chosen is not None and self.chosen.superblock.clean and not self.chosen.contested


async def look(device: BlockDevice, blocks: CardBlocks) -> Sight:
    """Look at the superblocks and, where there are none, at both ends. Raises DeviceError."""
    facts = ownership.facts_of(device)
    try:
        found = await ownership.read_superblocks(blocks, facts.size_bytes)
    except (UnknownVersion, UnknownFeature) as error:
        return Sight(Kind.UNKNOWN, facts, error=error)
    except FormatError as error:
        return Sight(Kind.DAMAGED, facts, error=error)
    if isinstance(found, Chosen):
        try:
            return Sight(Kind.OURS, facts, found, match(found.superblock, facts))
        except FormatError as error:
            return Sight(Kind.OURS, facts, found, error=error)
    size_bytes = facts.size_bytes // BLOCK_BYTES * BLOCK_BYTES
    head = await blocks.read(0, min(HEAD_BYTES, size_bytes))
    tail = await blocks.read(max(0, size_bytes - TAIL_BYTES), min(TAIL_BYTES, size_bytes))
    marks = tuple(recognise(head, tail, size_bytes))
    if isinstance(found, Blank) and not marks:
        if await ownership.samples_are_blank(blocks, size_bytes):
            return Sight(Kind.BLANK, facts)
        marks = (SOMETHING,)
    return Sight(Kind.STRANGER, facts, marks=marks)


async def owner_lives(blocks: CardBlocks, sight: Sight) -> bool:
    """Watch whether a gateway has the card now; takes three seconds where the last run did not end in order.

    Raises:
        DeviceError: it could not be read.
    """
    if sight.superblock is None or sight.clean:
        return False
    return await ownership.owner_beats(blocks, sight.superblock.stamp.card_uuid)


async def anybody_beats(blocks: CardBlocks) -> bool:
    """Watch whether the place of the heartbeat changes, whatever is written there. Raises DeviceError."""
    before = bytes(await blocks.read(HEARTBEAT_OFFSET, BLOCK_BYTES))
    for _ in range(ownership.WATCH_INTERVALS):
        await asyncio.sleep(INTERVAL_MS / 1000)
        if bytes(await blocks.read(HEARTBEAT_OFFSET, BLOCK_BYTES)) != before:
            return True
    return False


async def checkpoint_ends(
    blocks: CardBlocks, region: Region, card_uuid: bytes, kind: FileKind
) -> FileFacts | None:
    """Read both ends of a table file.

    Raises:
        FormatError: see `table_read.decode_ends`.
        DeviceError: they could not be read.
    """
    header = await blocks.read(region.offset_bytes, BLOCK_BYTES)
    closing = await blocks.read(region.end_bytes - BLOCK_BYTES, BLOCK_BYTES)
    return decode_ends(header, closing, region_bytes=region.length_bytes, card_uuid=card_uuid, kind=kind)


async def objects_in_checkpoint(blocks: CardBlocks, superblock: Superblock) -> int:
    """Return how many objects the newest checkpoint has; after an end in order these are all. Raises DeviceError."""
    files: list[FileFacts | None] = []
    for region in (superblock.layout.checkpoint_a, superblock.layout.checkpoint_b):
        try:
            files.append(
                await checkpoint_ends(blocks, region, superblock.stamp.card_uuid, FileKind.CHECKPOINT)
            )
        except FormatError:
            files.append(None)
    newest = next((files[place] for place in by_age(files)), None)
    return 0 if newest is None else newest.totals.rows.get(OBJECTS.ident, 0)
