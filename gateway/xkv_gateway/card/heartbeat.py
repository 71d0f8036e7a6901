"""The heartbeat: one block that the running owner rewrites each second, so that an opener can see that it lives.

It proves life, never death: a heartbeat that stands still says nothing about writes that are still on their way.
It has one copy and is worth nothing once read, so a damaged one (torn, as a rule) is read again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from xkv_gateway.card.format_errors import ForeignCard
from xkv_gateway.card.structure import BLOCK_BYTES, Stamp, Structure, is_blank

if TYPE_CHECKING:
    from xkv_gateway.card.structure import Bytes

HEARTBEAT: Final = Structure(
    "heartbeat",
    b"XKVHEART",
    BLOCK_BYTES,
    (
        ("u64", "beat"),
        ("u64", "superblock_sequence"),
        ("u64", "wall_time_ns"),
        ("u32", "interval_ms"),
        ("zero[4]", ""),
        ("utf8[64]", "owner"),
    ),
)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One beat of one run."""

    stamp: Stamp
    beat: int
    """Counts the beats of the run."""
    superblock_sequence: int
    wall_time_ns: int
    """For people; nothing is decided by it."""
    interval_ms: int
    """When the next beat is due, so that an opener knows how long to watch."""
    owner: str


def encode(heartbeat: Heartbeat) -> bytes:
    """Return the 4 KiB. Raises ValueError where the owner's name does not fit."""
    values = {name: getattr(heartbeat, name) for name in Heartbeat.__slots__ if name != "stamp"}
    return HEARTBEAT.pack(heartbeat.stamp, values)


def decode(block: Bytes, card_uuid: bytes) -> Heartbeat | None:
    """Return the beat, or None where none was written since the card was formatted.

    Raises:
        FormatError: Truncated, BadMagic, BadChecksum, UnknownVersion, BadField; ForeignCard: of another card.
    """
    if len(block) >= BLOCK_BYTES and is_blank(block):
        return None
    stamp, values = HEARTBEAT.unpack(block)
    if stamp.card_uuid != card_uuid:
        raise ForeignCard(HEARTBEAT.name, "card_uuid", "the heartbeat of another card")
    return Heartbeat(
        stamp,
        values["beat"],
        values["superblock_sequence"],
        values["wall_time_ns"],
        values["interval_ms"],
        values["owner"],
    )


def moved(before: Heartbeat | None, after: Heartbeat | None) -> bool:
    """Tell whether somebody wrote a beat between the two readings."""
    if after is None:
        return False
    return before is None or (before.stamp, before.beat) != (after.stamp, after.beat)
